"""The host's end of a control socket: requests out, answers in, each future owned by the request that made it.

A request that is cancelled is forgotten; an answer nobody waits for has its descriptors closed. When the other side goes
away every open request fails with `SandboxGone`, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from rollyard.core.errors import SandboxGone, SandboxInterrupted
from rollyard.sandbox.local.inner import protocol


class ChannelRefused(Exception):
    """The other side answered with an errno. The caller turns it into an error of ours."""

    def __init__(self, name: str, path: str | None, text: str | None) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.path, self.text = name, path, text


class Channel:
    """Belongs to the running loop. `closed` is set once the other side is gone or `close` was called."""

    def __init__(self, sock: socket.socket, *, name: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._greeting: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._waiting[0] = self._greeting  # from the start: it may come before it is asked for
        self.closed = asyncio.Event()
        self._loop.add_reader(sock.fileno(), self._read)

    async def request(
        self,
        op: str,
        fields: dict[str, Any] | None = None,
        *,
        fds: Sequence[int] = (),
        give: bool = False,
        timeout: float,
    ) -> tuple[dict[str, Any], list[int]]:
        """Send and wait for the answer: its fields and the descriptors that came with it, which are now the caller's.
        `give` closes `fds` here once they are on their way."""
        self._number += 1
        number = self._number
        future = self._expect(number)
        try:
            try:
                await self._send({"op": op, **(fields or {}), "n": number}, fds, timeout)
            finally:
                if give:
                    protocol.close_fds(fds)
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise SandboxInterrupted(f"{self._name}: no answer to {op!r} within {timeout:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def greeting(self, timeout: float) -> None:
        """The one message the other side sends unasked: that it is ready, or what it failed at."""
        try:
            async with asyncio.timeout(timeout):
                await self._greeting
        except TimeoutError:
            raise SandboxInterrupted(f"{self._name} was not ready within {timeout:g} s") from None

    def _expect(self, number: int) -> asyncio.Future[tuple[dict[str, Any], list[int]]]:
        if self.closed.is_set():
            raise self._gone_error()
        future = self._loop.create_future()
        self._waiting[number] = future
        return future

    def post(self, op: str, fields: dict[str, Any]) -> None:
        """Send and do not wait: for clean-up on the way out of a cancelled call."""
        self._number += 1
        if not self.closed.is_set():
            with contextlib.suppress(OSError):
                protocol.send(self._sock, {"op": op, **fields, "n": self._number})

    async def _send(self, message: dict[str, Any], fds: Sequence[int], timeout: float) -> None:
        deadline = self._loop.time() + timeout
        while True:
            try:
                protocol.send(self._sock, message, fds)
                return
            except BlockingIOError:
                if self._loop.time() > deadline:
                    raise TimeoutError from None
                await asyncio.sleep(0.002)
            except OSError:
                self.close()
                raise self._gone_error() from None

    def _read(self) -> None:
        while True:
            try:
                got = protocol.receive(self._sock)
            except BlockingIOError:
                return
            except OSError:
                got = None
            if got is None:
                self.close()
                return
            self._deliver(*got)

    def _deliver(self, message: dict[str, Any], fds: list[int]) -> None:
        future = self._waiting.pop(message.get("n", -1), None)
        if future is None or future.done():
            protocol.close_fds(fds)
        elif "ok" in message:
            future.set_result((message["ok"], fds))
        else:
            protocol.close_fds(fds)
            refused = ChannelRefused(message["error"], message.get("path") or message.get("step"), message.get("text"))
            future.set_exception(refused)

    def _gone_error(self) -> SandboxGone:
        return SandboxGone(f"{self._name} is gone", hint="open another sandbox")

    def close(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone_error())
                future.exception()  # seen: a request that is still being sent, or a greeting, may never be asked for
        self._waiting.clear()
