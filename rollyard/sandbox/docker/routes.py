"""How host and container reach each other without a network. Three routes, chosen once per backend, each with the same face:

    netns    sockets made in the container's own network namespace; needs the right to enter it
    socket   a unix socket in a directory bound into the container, and the relay's program at its other end
    exec     the relay's program over the stdin and stdout of an engine exec; works wherever the engine does

The relay's program is started when it is first needed, in Python or Node, whichever the image or a layer has.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

from rollyard.core.errors import GateUnreachable, PathError, SandboxGone, SandboxInterrupted
from rollyard.core.ids import new_id
from rollyard.core.protocols import ByteStream, Listener
from rollyard.sandbox.docker import netns
from rollyard.sandbox.docker.container import SOCKET_DIR
from rollyard.sandbox.docker.engine import Stream
from rollyard.sandbox.docker.programs import ROOT, Programs
from rollyard.sandbox.local.streams import SocketListener, SocketStream
from rollyard.sandbox.relay import Relay, RelayListener

Route = Literal["netns", "socket", "exec"]
ROUTES: tuple[Route, ...] = ("netns", "socket", "exec")
_DIAL_S = 15.0
_FIND = (
    "for p in python3 node; do command -v $p && exit; done; "
    "for p in /opt/rollyard/*/bin/python3 /opt/rollyard/*/bin/node; do [ -x $p ] && echo $p && exit; done; exit 1"
)


class Way(Protocol):
    async def listen(self, port: int) -> Listener: ...
    async def dial(self, port: int) -> ByteStream: ...
    def renewing(self) -> AbstractAsyncContextManager[None]:
        """Around the end of every process in the sandbox: listeners are there again when the block is left."""
        ...

    async def aclose(self) -> None: ...


class NetnsWay:
    """`pid` is the container's first process, as this machine counts."""

    def __init__(self, pid: int, sandbox_id: str) -> None:
        self._pid, self._id = pid, sandbox_id

    async def listen(self, port: int) -> SocketListener:
        try:
            sock = netns.listening(self._pid, port)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._id} is gone", hint="open another sandbox") from None
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            raise PathError(f"127.0.0.1:{port}", name, hint="another port, or 0 for any") from None
        return SocketListener(sock, sock.getsockname()[1])

    async def dial(self, port: int) -> SocketStream:
        try:
            sock = netns.unconnected(self._pid)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._id} is gone", hint="open another sandbox") from None
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_DIAL_S):
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except (OSError, TimeoutError) as error:
            sock.close()
            raise nothing_there(port, self._id, error) from error
        return SocketStream(sock)

    def renewing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def aclose(self) -> None:
        """Its sockets are their holders' own."""


class RelayWay:
    """The relay, started at the first use. `connect` starts its program and gives the pipe to it."""

    def __init__(self, connect: Callable[[AsyncExitStack], Awaitable[Relay]], sandbox_id: str) -> None:
        self._connect, self._id = connect, sandbox_id
        self._stack = AsyncExitStack()
        self._relay: Relay | None = None
        self._listeners: list[KeptListener] = []
        self.lock = asyncio.Lock()

    async def _up(self) -> Relay:
        if self._relay is None:
            self._relay = await self._stack.enter_async_context(await self._connect(self._stack))
        return self._relay

    async def listen(self, port: int) -> Listener:
        async with self.lock:
            try:
                inner = await (await self._up()).listen(port)
            except ConnectionRefusedError as error:
                raise PathError(f"127.0.0.1:{port}", "EADDRINUSE", hint=str(error)) from None
            listener = KeptListener(self, inner)
            self._listeners.append(listener)
            return listener

    async def dial(self, port: int) -> ByteStream:
        async with self.lock:
            relay = await self._up()
        try:
            return await relay.dial(port)
        except ConnectionRefusedError as error:
            raise nothing_there(port, self._id, error) from error

    @asynccontextmanager
    async def renewing(self) -> AsyncGenerator[None]:
        async with self.lock:
            yield
            if self._relay is None:
                return
            await self._stack.aclose()
            self._relay = None
            for listener in self._listeners:
                listener.inner = await (await self._up()).listen(listener.port)

    def forget(self, listener: KeptListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def aclose(self) -> None:
        await self._stack.aclose()


class KeptListener:
    """A listener that goes on when the relay's program was ended with all others and started again."""

    def __init__(self, way: RelayWay, inner: RelayListener) -> None:
        self._way, self.inner = way, inner
        self.port = inner.port

    @property
    def sock(self) -> None:
        return None

    async def accept(self) -> ByteStream:
        while True:
            inner = self.inner
            try:
                return await inner.accept()
            except SandboxGone:
                async with self._way.lock:
                    if self.inner is inner:
                        raise

    async def aclose(self) -> None:
        self._way.forget(self)
        await self.inner.aclose()


def nothing_there(port: int, sandbox_id: str, error: BaseException) -> SandboxInterrupted:
    return SandboxInterrupted(
        f"nothing answers on port {port} inside {sandbox_id}: {error}", hint="start the server first"
    )


async def _program(box: Programs) -> list[str]:
    """The relay's end inside, as a command."""
    found = await box.script(_FIND)
    if not found.ok:
        raise GateUnreachable(
            "the image has neither python3 nor node to run the relay with", hint="add one of them to it"
        )
    path = found.stdout.split(b"\n")[0].decode()
    name, flag = ("inside.js", "-e") if path.endswith("node") else ("inside.py", "-c")
    source = resources.files("rollyard.sandbox.relay").joinpath(name).read_text()
    return [path, flag, source]


async def over_exec(box: Programs, stack: AsyncExitStack) -> Relay:
    """Frames over the connection of one engine exec."""
    argv = await _program(box)
    _, stream = await box.attach(argv, env={}, user=ROOT)
    stack.callback(stream.close)
    said = bytearray()

    async def log() -> bytes:
        return bytes(said[-4096:])

    return Relay(_stdout(stream, said), stream.send, log=log)


async def _stdout(stream: Stream, said: bytearray) -> AsyncIterator[bytes]:
    while (got := await stream.receive()) is not None:
        if got[0] == 2:
            said += got[1]
        else:
            yield got[1]


class SocketDirs:
    """Directories of this machine for the sockets of one engine's sandboxes: short, since a socket's path may have 107
    bytes, closed to other users, and named so that engines do not sweep away each other's."""

    def __init__(self, host: str) -> None:
        self._prefix = f"rollyard-{hashlib.sha256(host.encode()).hexdigest()[:8]}-"

    def make(self, sandbox_id: str) -> Path:
        place = self._place(sandbox_id)
        place.mkdir(mode=0o700)
        return place

    def remove(self, sandbox_id: str) -> None:
        shutil.rmtree(self._place(sandbox_id), ignore_errors=True)

    def sweep(self, live: set[str]) -> None:
        """Remove those of sandboxes that are gone, when they are ours."""
        for place in Path(tempfile.gettempdir()).glob(f"{self._prefix}sbx_*"):
            if place.name.removeprefix(self._prefix) not in live and place.stat().st_uid == os.geteuid():
                shutil.rmtree(place, ignore_errors=True)

    def _place(self, sandbox_id: str) -> Path:
        return Path(tempfile.gettempdir(), f"{self._prefix}{sandbox_id}")


async def over_socket(box: Programs, place: Path, stack: AsyncExitStack) -> Relay:
    """Frames over a unix socket that both sides see. What is bound is the directory, so that this side may listen late."""
    path = place / new_id("r")
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_unix_server(accept, path)
    stack.callback(server.close)
    argv = await _program(box)
    _, program = await box.attach([*argv, f"unix:{SOCKET_DIR}/{path.name}"], env={}, user=ROOT)
    stack.callback(program.close)
    said = bytearray()
    listening = asyncio.create_task(_drain(program, said))
    stack.callback(listening.cancel)
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await accepted.get()
    except TimeoutError:
        words = bytes(said[-500:]).decode("utf-8", "replace")
        raise GateUnreachable(f"the relay did not connect in {_DIAL_S:g} s; its log ends: {words}") from None
    stack.callback(writer.close)

    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    async def log() -> bytes:
        return bytes(said[-4096:])

    return Relay(_chunks(reader), send, log=log)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(2**16):
        yield data


async def _drain(stream: Stream, said: bytearray) -> None:
    while (got := await stream.receive()) is not None:
        said += got[1]
