"""Programs a client started, as the SDK knows them: by a small number, with a stream of events that it may leave and rejoin.

A program is a job of the sandbox, so it outlives its client. Its number counts up per sandbox and is not the kernel's pid,
which a backend does not tell. A rejoined stream goes on where the last one was, so what was said in between is not lost.
"""

from __future__ import annotations

import asyncio
import base64
import signal as signals
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollyard.core.errors import Error, PathError
from rollyard.core.protocols import Job, Sandbox
from rollyard.core.sandbox import Exit
from rollyard.plane.compat.e2b.accounts import Accounts
from rollyard.plane.compat.e2b.errors import E2bRefusal

_KEPT_S = 30.0  # how long an ended program can still be asked about
KEEPALIVE_S = 50.0


class Process:
    def __init__(self, pid: int, job: Job, config: Mapping[str, Any], tag: str | None, deadline: float | None) -> None:
        self.pid, self.job, self.config, self.tag = pid, job, config, tag
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
        async for offset, data in self.job.stream(self._offsets[name], stderr=name == "stderr"):
            await events.put((name, data))
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
        if asked.get("pty"):
            raise E2bRefusal("unimplemented", "terminals are not served here")
        home = await self._accounts.home(user)
        cwd = config.get("cwd")
        who = {"HOME": home, "USER": user or "user", "LOGNAME": user or "user"}
        try:
            job = await self._sandbox.start(
                [config["cmd"], *config.get("args", ())],
                env={**who, **self._env, **(config.get("envs") or {})},
                cwd=await self._accounts.path(cwd, user) if cwd else await self._accounts.workdir(user),
                user=self._accounts.as_user(user),
                stdin=bool(asked.get("stdin", True)) and self._sandbox.capabilities.stdin,
            )
        except PathError as error:
            raise E2bRefusal("invalid_argument", str(error)) from error
        pid, self._next = self._next, self._next + 1
        process = self._by_pid[pid] = Process(pid, job, config, asked.get("tag"), deadline)
        if asked.get("stdin") is False:
            await job.close_stdin()
        process.over.add_done_callback(lambda _: self._forget_later(pid))
        return process

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
        await process.job.write(base64.b64decode(given.get("stdin") or given.get("pty") or ""))


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
