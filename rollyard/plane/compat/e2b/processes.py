"""Programs a client started, as the SDK knows them: by a small number, with a stream of events that it may leave and rejoin.

A program is a job of the sandbox, so it outlives its client and the server that started it. Its number counts up per sandbox and
is not the kernel's pid, which a backend does not tell. Which job it is stands in the plane's storage (`KeptPrograms`), so that
every replica finds it. A rejoined stream goes on where the last one was, so what was said in between is not lost; where nobody
knows where that was, it begins again.
"""

from __future__ import annotations

import asyncio
import base64
import signal as signals
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from importlib import resources
from typing import Any

from rollyard.core.errors import Error, PathError, SandboxGone
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.protocols import Job, Sandbox
from rollyard.core.sandbox import Exit
from rollyard.plane.compat.e2b.accounts import Accounts
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.programs import E2bProgram, KeptPrograms

_log = Log("rollyard.e2b")
_KEPT_S = 30.0  # how long an ended program can still be asked about
KEEPALIVE_S = 50.0
_STEP_S = 30.0


class Process:
    """`terminal` says that it has one: what it shows is then all its output, and input is put in frames."""

    def __init__(
        self,
        pid: int,
        job: Job,
        config: Mapping[str, Any],
        tag: str | None,
        deadline: float | None,
        *,
        terminal: bool = False,
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        self.pid, self.job, self.config, self.tag, self.terminal = pid, job, config, tag, terminal
        self.offsets = {"stdout": 0, "stderr": 0, **(offsets or {})}
        self.timed_out = False
        self.over = asyncio.create_task(self._until_over(deadline))

    async def _until_over(self, deadline: float | None) -> Exit:
        try:
            async with asyncio.timeout(deadline):
                return await self.job.wait()
        except TimeoutError:
            self.timed_out = True
            await self.job.kill()
            return await self.job.wait(30.0)

    async def events(self, keepalive_s: float) -> AsyncIterator[dict[str, Any]]:
        """From where the last reader was, until the program is over and all of it was read."""
        events: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue(64)
        pumping = asyncio.create_task(self._pump_both(events))
        getting = asyncio.ensure_future(events.get())
        try:
            yield {"start": {"pid": self.pid}}
            while True:
                if not (await asyncio.wait([getting], timeout=keepalive_s))[0]:
                    yield {"keepalive": {}}
                    continue
                got = getting.result()
                if got is None:
                    break
                getting = asyncio.ensure_future(events.get())
                yield {"data": {got[0]: base64.b64encode(got[1]).decode()}}
            await pumping
            ended = await asyncio.shield(self.over)
            if self.timed_out:
                raise E2bRefusal("deadline_exceeded", "the process ran past its timeout")
            yield {"end": ending_of(ended)}
        finally:
            getting.cancel()
            pumping.cancel()
            await asyncio.wait([getting, pumping], timeout=5)

    async def _pump_both(self, events: asyncio.Queue[tuple[str, bytes] | None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.offsets:
                    group.create_task(self._pump(name, events))
        except* Error as errors:
            raise errors.exceptions[0] from None
        finally:
            await events.put(None)

    async def _pump(self, name: str, events: asyncio.Queue[tuple[str, bytes] | None]) -> None:
        shown = "pty" if self.terminal and name == "stdout" else name
        async for offset, data in self.job.stream(self.offsets[name], stderr=name == "stderr"):
            await events.put((shown, data))
            self.offsets[name] = max(offset, self.offsets[name])


class Processes:
    """One sandbox's. Without `kept` they are known to this server alone."""

    def __init__(
        self, sandbox: Sandbox, accounts: Accounts, env: Mapping[str, str], kept: KeptPrograms | None = None
    ) -> None:
        self._sandbox, self._accounts, self._env, self._kept = sandbox, accounts, env, kept
        self._by_pid: dict[int, Process] = {}
        self._next = 1
        self._notes: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """No program runs, and none has just ended."""
        return not self._by_pid

    async def _find_others(self) -> None:
        """Meet the programs that other servers, or this one before a restart, have started."""
        for pid, program in await self._kept.list() if self._kept is not None else ():
            self._next = max(self._next, pid + 1)
            if pid in self._by_pid:
                continue
            try:
                job = await self._sandbox.job(program.job_id)
            except SandboxGone:  # its server died before it began
                continue
            if pid not in self._by_pid:
                left = None if program.deadline is None else max(0.0, program.deadline - time.time())
                config, terminal, offsets = program.config, program.terminal, program.offsets
                self._meet(Process(pid, job, config, program.tag, left, terminal=terminal, offsets=offsets))

    def _meet(self, process: Process) -> Process:
        self._by_pid[process.pid] = process
        process.over.add_done_callback(lambda _: self._forget_later(process.pid))
        return process

    async def _take_number(self, program: E2bProgram) -> int:
        """A number that no program of the sandbox has, on any server; under it the program is found from now on."""
        if self._kept is None:
            pid, self._next = self._next, self._next + 1
            return pid
        while True:
            pid, self._next = self._next, self._next + 1
            if await self._kept.add(pid, program):
                return pid
            await self._find_others()

    def note_reader_gone(self, process: Process) -> None:
        """A client that rejoins it, at any server, goes on from here."""
        if self._kept is not None and not process.over.done():
            self._in_background(self._kept.note(process.pid, process.offsets))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        note = asyncio.ensure_future(work)
        self._notes.add(note)
        note.add_done_callback(self._noted)

    def _noted(self, note: asyncio.Task[None]) -> None:
        self._notes.discard(note)
        if not note.cancelled() and (error := note.exception()) is not None:
            _log.warning("a program's record was not changed", cause=str(error))

    async def start(self, request: Mapping[str, Any], *, user: str | None, deadline: float | None) -> Process:
        config: Mapping[str, Any] = request.get("process") or {}
        if not config.get("cmd"):
            raise E2bRefusal("invalid_argument", "process.cmd is required")
        argv, terminal = [config["cmd"], *config.get("args", ())], request.get("pty")
        if terminal:
            argv = await self._in_terminal(argv, _size(terminal))
        home = await self._accounts.home(user)
        cwd = config.get("cwd")
        program = E2bProgram(
            job_id=new_id("job"),
            config=config,
            tag=request.get("tag"),
            terminal=bool(terminal),
            deadline=None if deadline is None else time.time() + deadline,
        )
        pid = await self._take_number(program)
        who = {"HOME": home, "USER": user or "user", "LOGNAME": user or "user"}
        try:
            job = await self._sandbox.start(
                argv,
                env={**who, **self._env, **(config.get("envs") or {})},
                cwd=await self._accounts.path(cwd, user) if cwd else await self._accounts.workdir(user),
                user=self._accounts.as_user(user),
                stdin=bool(terminal or request.get("stdin", True)) and self._sandbox.capabilities.stdin,
                job_id=program.job_id,
            )
        except BaseException as error:  # cancelled too: a number without a program goes back
            if self._kept is not None:
                self._in_background(self._kept.drop(pid))
            if isinstance(error, PathError):
                raise E2bRefusal("invalid_argument", str(error)) from error
            raise
        process = self._meet(Process(pid, job, config, program.tag, deadline, terminal=program.terminal))
        if request.get("stdin") is False and not terminal:
            await job.close_stdin()
        return process

    async def _in_terminal(self, argv: Sequence[str], size: tuple[int, int]) -> list[str]:
        """The program under one of ours that gives it a terminal."""
        if not self._sandbox.capabilities.stdin:
            raise E2bRefusal("unimplemented", "programs of this sandbox have no stdin, so there are no terminals")
        found = await self._sandbox.exec("command -v python3", timeout=_STEP_S)
        if not found.ok:
            raise E2bRefusal("unimplemented", "a terminal needs python3 in the sandbox's image")
        source = resources.files("rollyard.inside").joinpath("terminal.py").read_text()
        return [found.stdout.decode().strip(), "-c", source, str(size[0]), str(size[1]), *argv]

    async def resize(self, request: Mapping[str, Any]) -> None:
        process = await self.select(request, running=True)
        if request.get("pty"):
            if not process.terminal:
                raise E2bRefusal("invalid_argument", f"process {process.pid} has no terminal")
            await process.job.write(_frame(b"r", struct.pack(">HH", *_size(request["pty"]))))

    def _forget_later(self, pid: int) -> None:
        asyncio.get_running_loop().call_later(_KEPT_S, self._forget, pid)

    def _forget(self, pid: int) -> None:
        if self._by_pid.pop(pid, None) is not None and self._kept is not None:
            self._in_background(self._kept.drop(pid))

    async def select(self, request: Mapping[str, Any], *, running: bool = False) -> Process:
        selector: Mapping[str, Any] = request.get("process") or {}
        if (found := self._select(selector, running)) is None:
            await self._find_others()
            found = self._select(selector, running)
        if found is None:
            raise E2bRefusal("not_found", f"no process {selector.get('pid', selector.get('tag'))}")
        return found

    def _select(self, selector: Mapping[str, Any], running: bool) -> Process | None:
        for process in self._by_pid.values():
            named = process.pid == selector.get("pid") or (process.tag and process.tag == selector.get("tag"))
            if named and not (running and process.over.done()):
                return process
        return None

    async def list(self) -> list[dict[str, Any]]:
        await self._find_others()
        return [
            {"config": dict(process.config), "pid": process.pid, **({"tag": process.tag} if process.tag else {})}
            for process in list(self._by_pid.values())
            if not process.over.done() and await process.job.poll() is None
        ]

    async def signal(self, request: Mapping[str, Any]) -> None:
        process = await self.select(request, running=True)
        if request.get("signal") not in ("SIGNAL_SIGKILL", 9):
            raise E2bRefusal("unimplemented", f"only SIGNAL_SIGKILL is served, not {request.get('signal')!r}")
        await process.job.kill()

    async def feed(self, request: Mapping[str, Any]) -> None:
        process = await self.select(request, running=True)
        given: Mapping[str, str] = request.get("input") or {}
        data = base64.b64decode(given.get("stdin") or given.get("pty") or "")
        await process.job.write(_frame(b"i", data) if process.terminal else data)


def _frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body)) + body


def _size(terminal: Mapping[str, Any]) -> tuple[int, int]:
    size: Mapping[str, Any] = terminal.get("size") or {}
    columns, rows = size.get("cols", 80), size.get("rows", 24)
    if not all(isinstance(one, int) and 0 < one < 2**16 for one in (columns, rows)):
        raise E2bRefusal("invalid_argument", f"a terminal's size is two positive numbers, got {columns!r} and {rows!r}")
    return columns, rows


def ending_of(done: Exit) -> dict[str, Any]:
    number = done.signal
    if number is None and done.exit_code is not None:
        code = done.exit_code
        return {
            "exitCode": code,
            "exited": True,
            "status": f"exit status {code}",
            **_error(f"exit status {code}", code),
        }
    words = "signal: " + (signals.strsignal(number or 9) or str(number)).lower()
    return {"exitCode": -1, "exited": False, "status": words, "error": words}


def _error(words: str, code: int) -> dict[str, str]:
    return {"error": words} if code else {}
