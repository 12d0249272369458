"""A sandbox's relay over its lifetime: started when it is first needed, and again when its pipe broke or its program was ended.

Connections that were open end, as they would on any network; listeners stay, on the same ports. A relay that cannot be started
again, or breaks again at once, is the end of its listeners, with its last words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from rollyard.core.errors import Error, PathError, SandboxGone, SandboxInterrupted
from rollyard.core.protocols import ByteStream
from rollyard.sandbox.relay.mux import HostRelay, RelayListener

STEADY_S = 5.0  # one that lived shorter than this ended quickly
_QUICK_ENDS = 3  # in a row, and it is not started again by itself
_TRIES = 5
_AGAIN_S = 1.0


class RelayAccess:
    """`connect` starts the relay's program and gives the pipe to it; what it pushes on the stack is undone with the relay."""

    def __init__(self, connect: Callable[[AsyncExitStack], Awaitable[HostRelay]], sandbox_id: str) -> None:
        self._connect, self._id = connect, sandbox_id
        self._stack = AsyncExitStack()
        self._relay: HostRelay | None = None
        self._began, self._quick, self._closed = 0.0, 0, False
        self._listeners: list[KeptListener] = []
        self._lock = asyncio.Lock()

    async def _up(self) -> HostRelay:
        if self._relay is not None and self._relay.ended:
            await self._down()
        if self._relay is None:
            try:
                relay = await self._stack.enter_async_context(await self._connect(self._stack))
                for listener in self._listeners:
                    listener.inner = await relay.listen(listener.port)
            except BaseException:  # cancelled too: half a relay holds its ports
                await self._down()
                raise
            self._relay, self._began = relay, time.monotonic()
        return self._relay

    async def _down(self) -> None:
        self._relay = None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    async def listen(self, port: int) -> KeptListener:
        async with self._lock:
            try:
                inner = await (await self._up()).listen(port)
            except ConnectionRefusedError as error:
                raise PathError(f"127.0.0.1:{port}", "EADDRINUSE", hint=str(error)) from None
            listener = KeptListener(self, inner)
            self._listeners.append(listener)
            return listener

    async def dial(self, port: int) -> ByteStream:
        async with self._lock:
            relay = await self._up()
        try:
            return await relay.dial(port)
        except ConnectionRefusedError as error:
            raise no_listener_error(port, self._id, error) from error

    @asynccontextmanager
    async def renewing(self) -> AsyncGenerator[None]:
        """Around the end of every process in the sandbox: listeners are there again when the block is left."""
        async with self._lock:
            yield
            if self._relay is not None:
                await self._down()
                await self._up()

    async def mend(self, listener: KeptListener, broken: RelayListener) -> None:
        """Give a listener whose relay has ended another one."""
        async with self._lock:
            if listener.inner is not broken:
                return
            self._quick = self._quick + 1 if time.monotonic() - self._began < STEADY_S else 0
            if self._closed or self._quick > _QUICK_ENDS:
                raise SandboxGone("the relay in the sandbox ended, and is not started again")
            for left in reversed(range(_TRIES)):
                try:
                    await self._up()
                except SandboxGone:
                    raise
                except (Error, OSError):
                    if not left:
                        raise
                    await asyncio.sleep(_AGAIN_S)
                else:
                    return

    def forget(self, listener: KeptListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def aclose(self) -> None:
        self._closed = True
        await self._down()


class KeptListener:
    """A listener that outlives the relay it began with."""

    def __init__(self, access: RelayAccess, inner: RelayListener) -> None:
        self._access, self.inner = access, inner
        self.port = inner.port

    @property
    def sock(self) -> None:
        return None

    async def accept(self) -> ByteStream:
        while True:
            inner = self.inner
            try:
                return await inner.accept()
            except SandboxGone as ended:
                try:
                    await self._access.mend(self, inner)
                except (Error, OSError):
                    raise ended from None

    async def aclose(self) -> None:
        self._access.forget(self)
        await self.inner.aclose()


def no_listener_error(port: int, sandbox_id: str, error: BaseException) -> SandboxInterrupted:
    return SandboxInterrupted(
        f"nothing answers on port {port} inside {sandbox_id}: {error}", hint="start the server first"
    )
