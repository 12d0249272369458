"""One background program, as the host sees it: asks the supervisor about its end, reads its output from host files.

The files outlive the connection, so a stream resumes at any offset, from any process that attached.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rollyard.core.errors import Error, PathError, SandboxGone
from rollyard.core.sandbox import Exit
from rollyard.sandbox.local.channel import Channel, ChannelRefused
from rollyard.sandbox.local.inner import protocol

_CHUNK = 2**16
ANSWER_S = 120.0  # a supervisor that died is known at once; one that is silent waits for a processor


class LocalJob:
    """`stdin` is the write end of the program's stdin, when this object started it with one."""

    def __init__(
        self,
        job_id: str,
        channel: Channel,
        files: Path,
        *,
        stdin: int | None = None,
        finish: Callable[[dict[str, Any], bytes, bytes], Exit],
    ) -> None:
        self.id = job_id
        self._channel = channel
        self._files = files
        self._stdin = stdin
        self._finish = finish
        self._result: dict[str, Any] | None = None
        self._ending: asyncio.Task[tuple[dict[str, Any], list[int]]] | None = None  # asked once, for all who wait

    async def _ask(self, op: str, timeout: float = ANSWER_S, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            return await self._channel.request(op, {"job": self.id, **fields}, timeout=timeout)
        except ChannelRefused as refused:
            if refused.name == "ESRCH":
                raise SandboxGone(
                    f"job {self.id} is not known here", hint="list them with the sandbox that ran it"
                ) from None
            raise PathError(refused.path or self.id, refused.name) from None

    async def poll(self) -> int | None:
        """The exit code once it has ended (128 + signal for a death by signal), None while it runs."""
        if self._result is None:
            reply, _ = await self._ask("wait", now=True)
            if reply["running"]:
                return None
            self._result = reply
        code, signal = self._result["exit_code"], self._result["signal"]
        return code if code is not None else 128 + (signal or 9)

    async def wait(self, timeout: float | None = None) -> Exit:
        """Its end, with the output it left. Raises TimeoutError and leaves it running when it takes longer."""
        if self._result is None:
            try:
                async with asyncio.timeout(timeout):
                    await self._wait_end()
            except SandboxGone:
                return self._finish({"exit_code": None, "signal": None, "lost": True}, *self._tails())
        assert self._result is not None
        return self._finish(self._result, *self._tails())

    def _tails(self) -> tuple[bytes, bytes]:
        return self._read("out", 0, 16 * 2**20), self._read("err", 0, 16 * 2**20)

    def _read(self, name: str, offset: int, size: int) -> bytes:
        try:
            fd = os.open(self._files / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return protocol.read_at(fd, size, offset)
        finally:
            os.close(fd)

    async def stream(self, offset: int = 0, *, stderr: bool = False) -> AsyncIterator[tuple[int, bytes]]:
        """Chunks as they come, each with the offset after it: where to resume. Ends when the program has. A silent one is looked
        at more and more rarely, since thousands may wait: a chunk is late by a tenth of the silence, at most by five seconds."""
        name, pause, silent = ("err" if stderr else "out"), 0.005, 0.0
        ended = asyncio.ensure_future(self._wait_end())
        ended.add_done_callback(_note_seen)
        try:
            while True:
                over = ended.done()
                if data := self._read(name, offset, _CHUNK):
                    offset += len(data)
                    pause, silent = 0.005, 0.0
                    yield offset, data
                elif over:
                    ended.result()
                    return
                else:
                    await asyncio.wait([ended], timeout=pause)
                    silent += pause
                    pause = min(pause * 1.5, max(0.1, silent / 10), 5.0)
        finally:
            ended.cancel()

    async def _wait_end(self) -> None:
        """The question outlives a caller who no longer waits; it ends with the program or with the sandbox."""
        if self._result is None:
            if self._ending is None:
                self._ending = asyncio.create_task(self._ask("wait", timeout=30 * 86400.0), name="rollyard-job")
                self._ending.add_done_callback(_note_seen)
            self._result, _ = await asyncio.shield(self._ending)

    async def tail(self, n: int = 4096, *, stderr: bool = False) -> bytes:
        name = "err" if stderr else "out"
        try:
            size = (self._files / name).stat().st_size
        except FileNotFoundError:
            return b""
        return self._read(name, max(0, size - n), n)

    async def write(self, data: bytes) -> None:
        if self._stdin is None:
            _, (self._stdin,) = await self._ask("stdin")
            os.set_blocking(self._stdin, False)
        view = memoryview(data)
        loop = asyncio.get_running_loop()
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await _writable(loop, self._stdin)
            except BrokenPipeError:
                raise PathError(f"stdin of {self.id}", "EPIPE", hint="the program has ended or closed it") from None

    async def close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        try:
            await self._ask("stdin", close=True)
        except Error:  # it has ended; there is nothing to close
            return

    async def cpu_s(self) -> float | None:
        """CPU seconds of the program and everything below it, dead or alive."""
        reply, _ = await self._ask("cpu")
        return reply["cpu_s"]

    async def kill(self) -> None:
        """End the whole tree, what a program that has ended left running too. Idempotent."""
        await self._ask("kill")
        if self._result is not None:
            return
        try:
            self._result, _ = await self._ask("wait", timeout=5.0)
        except SandboxGone:
            return
        except Error:
            await self._ask("kill", force=True)
            self._result, _ = await self._ask("wait")


async def _writable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _note_seen(ended: asyncio.Task[Any]) -> None:
    """A reader may have left before its program's end was known, and then nobody asks how it came."""
    if not ended.cancelled():
        ended.exception()
