"""Programs a client started, as the SDK knows them: by a small number, with a stream of events that it may leave and rejoin.

A program is a job of the sandbox, so it outlives its client. Its number counts up per sandbox and is not the kernel's pid,
which a backend does not tell. A rejoined stream goes on where the last one was, so what was said in between is not lost.
"""

from __future__ import annotations

import asyncio
import base64
import signal as signals
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import resources
from typing import Any

from rollyard.core.errors import Error, PathError
from rollyard.core.protocols import Job, Sandbox
from rollyard.core.sandbox import Exit
from rollyard.plane.compat.e2b.accounts import Accounts
from rollyard.plane.compat.e2b.errors import E2bRefusal

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
    ) -> None:
        self.pid, self.job, self.config, self.tag, self.terminal = pid, job, config, tag, terminal
        self._offsets = {"stdout": 0, "stderr": 0}
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
                for name in self._offsets:
                    group.create_task(self._pump(name, events))
        except* Error as errors:
            raise errors.exceptions[0] from None
        finally:
            await events.put(None)

    async def _pump(self, name: str, events: asyncio.Queue[tuple[str, bytes] | None]) -> None:
        shown = "pty" if self.terminal and name == "stdout" else name
        async for offset, data in self.job.stream(self._offsets[name], stderr=name == "stderr"):
            await events.put((shown, data))
            self._offsets[name] = max(offset, self._offsets[name])


class Processes:
    """One sandbox's."""

    def __init__(self, sandbox: Sandbox, accounts: Accounts, env: Mapping[str, str]) -> None:
        self._sandbox, self._accounts, self._env = sandbox, accounts, env
        self._by_pid: dict[int, Process] = {}
        self._next = 1

    @property
    def idle(self) -> bool:
        """No program runs, and none has just ended."""
        return not self._by_pid

    async def start(self, asked: Mapping[str, Any], *, user: str | None, deadline: float | None) -> Process:
        config: Mapping[str, Any] = asked.get("process") or {}
        if not config.get("cmd"):
            raise E2bRefusal("invalid_argument", "process.cmd is required")
        argv, terminal = [config["cmd"], *config.get("args", ())], asked.get("pty")
        if terminal:
            argv = await self._in_terminal(argv, _size(terminal))
        home = await self._accounts.home(user)
        cwd = config.get("cwd")
        who = {"HOME": home, "USER": user or "user", "LOGNAME": user or "user"}
        try:
            job = await self._sandbox.start(
                argv,
                env={**who, **self._env, **(config.get("envs") or {})},
                cwd=await self._accounts.path(cwd, user) if cwd else await self._accounts.workdir(user),
                user=self._accounts.as_user(user),
                stdin=bool(terminal or asked.get("stdin", True)) and self._sandbox.capabilities.stdin,
            )
        except PathError as error:
            raise E2bRefusal("invalid_argument", str(error)) from error
        pid, self._next = self._next, self._next + 1
        process = Process(pid, job, config, asked.get("tag"), deadline, terminal=bool(terminal))
        self._by_pid[pid] = process
        if asked.get("stdin") is False and not terminal:
            await job.close_stdin()
        process.over.add_done_callback(lambda _: self._forget_later(pid))
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

    async def resize(self, asked: Mapping[str, Any]) -> None:
        process = self.select(asked, running=True)
        if asked.get("pty"):
            if not process.terminal:
                raise E2bRefusal("invalid_argument", f"process {process.pid} has no terminal")
            await process.job.write(_frame(b"r", struct.pack(">HH", *_size(asked["pty"]))))

    def _forget_later(self, pid: int) -> None:
        asyncio.get_running_loop().call_later(_KEPT_S, self._by_pid.pop, pid, None)

    def select(self, asked: Mapping[str, Any], *, running: bool = False) -> Process:
        selector: Mapping[str, Any] = asked.get("process") or {}
        for process in self._by_pid.values():
            named = process.pid == selector.get("pid") or (process.tag and process.tag == selector.get("tag"))
            if named and not (running and process.over.done()):
                return process
        raise E2bRefusal("not_found", f"no process {selector.get('pid', selector.get('tag'))}")

    def list(self) -> list[dict[str, Any]]:
        return [
            {"config": dict(process.config), "pid": process.pid, **({"tag": process.tag} if process.tag else {})}
            for process in self._by_pid.values()
            if not process.over.done()
        ]

    async def signal(self, asked: Mapping[str, Any]) -> None:
        process = self.select(asked, running=True)
        if asked.get("signal") not in ("SIGNAL_SIGKILL", 9):
            raise E2bRefusal("unimplemented", f"only SIGNAL_SIGKILL is served, not {asked.get('signal')!r}")
        await process.job.kill()

    async def feed(self, asked: Mapping[str, Any]) -> None:
        process = self.select(asked, running=True)
        given: Mapping[str, str] = asked.get("input") or {}
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
