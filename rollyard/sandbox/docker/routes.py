"""How host and container reach each other without a network. Three routes, chosen once per backend, each with the same face:

    netns    sockets made in the container's own network namespace; needs the right to enter it
    socket   a unix socket in a directory bound into the container, and the relay's program at its other end
    exec     the relay's program over the stdin and stdout of an engine exec; works wherever the engine does

The relay's program is started when it is first needed, in Python or Node, whichever the image or a layer has.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
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
from rollyard.sandbox.relay import Relay

Route = Literal["netns", "socket", "exec"]
ROUTES: tuple[Route, ...] = ("netns", "socket", "exec")
_DIAL_S = 15.0
_PREFIX = "rollyard-"
_FIND = (
    "for p in python3 node; do command -v $p && exit; done; "
    "for p in /opt/rollyard/*/bin/python3 /opt/rollyard/*/bin/node; do [ -x $p ] && echo $p && exit; done; exit 1"
)
_PYTHON_SOCKET = (
    "import os, socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
    "os.dup2(s.fileno(), 0)\nos.dup2(s.fileno(), 1)\n"
)
_NODE_SOCKET = (
    'const s = require("net").connect(process.argv[1]);\n'
    'Object.defineProperty(process, "stdin", {value: s});\nObject.defineProperty(process, "stdout", {value: s});\n'
)


class Way(Protocol):
    async def listen(self, port: int) -> Listener: ...
    async def dial(self, port: int) -> ByteStream: ...
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

    async def aclose(self) -> None:
        """Its sockets are their holders' own."""


class RelayWay:
    """The relay, started at the first use. `connect` starts its program and gives the pipe to it."""

    def __init__(self, connect: Callable[[AsyncExitStack], Awaitable[Relay]], sandbox_id: str) -> None:
        self._connect, self._id = connect, sandbox_id
        self._stack = AsyncExitStack()
        self._relay: Relay | None = None
        self._lock = asyncio.Lock()

    async def _up(self) -> Relay:
        async with self._lock:
            if self._relay is None:
                self._relay = await self._stack.enter_async_context(await self._connect(self._stack))
            return self._relay

    async def listen(self, port: int) -> Listener:
        try:
            return await (await self._up()).listen(port)
        except ConnectionRefusedError as error:
            raise PathError(f"127.0.0.1:{port}", "EADDRINUSE", hint=str(error)) from None

    async def dial(self, port: int) -> ByteStream:
        try:
            return await (await self._up()).dial(port)
        except ConnectionRefusedError as error:
            raise nothing_there(port, self._id, error) from error

    async def aclose(self) -> None:
        await self._stack.aclose()


def nothing_there(port: int, sandbox_id: str, error: BaseException) -> SandboxInterrupted:
    return SandboxInterrupted(
        f"nothing answers on port {port} inside {sandbox_id}: {error}", hint="start the server first"
    )


async def _program(box: Programs, prefix: dict[str, str]) -> list[str]:
    """The relay's end inside, as a command; `prefix` is what to run before it, by interpreter."""
    found = await box.script(_FIND)
    if not found.ok:
        raise GateUnreachable(
            "the image has neither python3 nor node to run the relay with", hint="add one of them to it"
        )
    path = found.stdout.split(b"\n")[0].decode()
    name, flag = ("inside.js", "-e") if path.endswith("node") else ("inside.py", "-c")
    source = resources.files("rollyard.sandbox.relay").joinpath(name).read_text()
    return [path, flag, prefix.get(name, "") + source]


async def over_exec(box: Programs, stack: AsyncExitStack) -> Relay:
    """Frames over the connection of one engine exec."""
    argv = await _program(box, {})
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


def make_dir(sandbox_id: str) -> Path:
    """A directory of this machine for one sandbox's sockets: short, since a socket's path may have 107 bytes, and closed
    to other users."""
    place = _dir(sandbox_id)
    place.mkdir(mode=0o700)
    return place


def remove_dir(sandbox_id: str) -> None:
    shutil.rmtree(_dir(sandbox_id), ignore_errors=True)


def sweep_dirs(live: set[str]) -> None:
    """Remove those of sandboxes that are gone, when they are ours."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}sbx_*"):
        if place.name.removeprefix(_PREFIX) not in live and place.stat().st_uid == os.geteuid():
            shutil.rmtree(place, ignore_errors=True)


def _dir(sandbox_id: str) -> Path:
    return Path(tempfile.gettempdir(), f"{_PREFIX}{sandbox_id}")


async def over_socket(box: Programs, place: Path, stack: AsyncExitStack) -> Relay:
    """Frames over a unix socket that both sides see. What is bound is the directory, so that this side may listen late."""
    path = place / new_id("r")
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_unix_server(accept, path)
    stack.callback(server.close)
    argv = await _program(box, {"inside.py": _PYTHON_SOCKET, "inside.js": _NODE_SOCKET})
    _, program = await box.attach([*argv, f"{SOCKET_DIR}/{path.name}"], env={}, user=ROOT)
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
