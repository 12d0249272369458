"""How host and container reach each other without a network. Three routes, chosen once per backend, each with the same methods:

    netns    sockets made in the container's own network namespace; needs the right to enter it
    socket   a unix socket in a directory bound into the container, and the relay's program at its other end
    exec     the relay's program over the stdin and stdout of an engine exec; works wherever the engine does

The last two are the relay's (`rollyard.sandbox.relay`), started when it is first needed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Literal, Protocol

from rollyard.core import folders
from rollyard.core.errors import GateUnreachable, PathError, SandboxGone
from rollyard.core.ids import new_id
from rollyard.core.protocols import ByteStream, Listener
from rollyard.sandbox.docker import netns
from rollyard.sandbox.docker.container import SOCKET_DIR
from rollyard.sandbox.docker.engine import Stream
from rollyard.sandbox.docker.programs import ROOT, DockerPrograms
from rollyard.sandbox.relay import HostRelay, program
from rollyard.sandbox.relay.port_access import no_listener_error
from rollyard.sandbox.streams import SocketListener, SocketStream

Route = Literal["netns", "socket", "exec"]
ROUTES: tuple[Route, ...] = ("netns", "socket", "exec")
_DIAL_S = 15.0


class PortAccess(Protocol):
    async def listen(self, port: int) -> Listener: ...
    async def dial(self, port: int) -> ByteStream: ...
    def renewing(self) -> AbstractAsyncContextManager[None]:
        """Around the end of every process in the sandbox: listeners are there again when the block is left."""
        ...

    async def aclose(self) -> None: ...


class NetnsAccess:
    """`pid` is the container's first process, as this machine counts."""

    def __init__(self, pid: int, sandbox_id: str) -> None:
        self._pid, self._id = pid, sandbox_id

    async def listen(self, port: int) -> SocketListener:
        return await self.listen_at("127.0.0.1", port)

    async def listen_at(self, address: str, port: int) -> SocketListener:
        sock = self._make(lambda: netns.open_listener(self._pid, port, address), f"{address}:{port}")
        return SocketListener(sock, sock.getsockname()[1])

    async def bind_datagrams(self, address: str, port: int) -> socket.socket:
        return self._make(lambda: netns.bind_datagrams(self._pid, address, port), f"{address}:{port}")

    def _make(self, make: Callable[[], socket.socket], place: str) -> socket.socket:
        try:
            return make()
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._id} is gone", hint="open another sandbox") from None
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "EIO")
            raise PathError(place, name, hint="another port, or 0 for any") from None

    async def dial(self, port: int) -> SocketStream:
        try:
            sock = netns.open_socket(self._pid)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {self._id} is gone", hint="open another sandbox") from None
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_DIAL_S):
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except (OSError, TimeoutError) as error:
            sock.close()
            raise no_listener_error(port, self._id, error) from error
        return SocketStream(sock)

    def renewing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def aclose(self) -> None:
        """Its sockets are their holders' own."""


async def over_exec(box: DockerPrograms, stack: AsyncExitStack) -> HostRelay:
    """Frames over the connection of one engine exec."""
    argv = program.command(await box.script(program.FIND))
    _, stream = await box.attach(argv, env={}, user=ROOT)
    stack.callback(stream.close)
    said = bytearray()

    async def log() -> bytes:
        return bytes(said[-4096:])

    return HostRelay(_stdout(stream, said), stream.send, log=log)


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
        _drop(self._place(sandbox_id))

    def sweep(self, live: set[str]) -> None:
        """Remove those of sandboxes that are gone, when they are ours."""
        for place in Path(tempfile.gettempdir()).glob(f"{self._prefix}sbx_*"):
            if place.name.removeprefix(self._prefix) not in live and place.stat().st_uid == os.geteuid():
                _drop(place)

    def _place(self, sandbox_id: str) -> Path:
        return Path(tempfile.gettempdir(), f"{self._prefix}{sandbox_id}")


async def over_socket(box: DockerPrograms, place: Path, stack: AsyncExitStack) -> HostRelay:
    """Frames over a unix socket that both sides see. What is bound is the directory, so that this side may listen late."""
    path = place / new_id("r")
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_unix_server(accept, path)
    stack.callback(server.close)
    argv = program.command(await box.script(program.FIND))
    _, running = await box.attach([*argv, f"unix:{SOCKET_DIR}/{path.name}"], env={}, user=ROOT)
    stack.callback(running.close)
    said = bytearray()
    listening = asyncio.create_task(_drain(running, said))
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

    return HostRelay(_chunks(reader), send, log=log)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(2**16):
        yield data


async def _drain(stream: Stream, said: bytearray) -> None:
    while (got := await stream.receive()) is not None:
        said += got[1]


def _drop(place: Path) -> None:
    with suppress(OSError):  # a sandbox may have left in it what only its own ids can remove
        folders.remove(place)
