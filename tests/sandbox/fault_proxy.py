"""A proxy between a real client and a real server that fails as networks and gateways do: on purpose, as often as it is told.

It carries one request per connection and touches no byte of what it does not break. Over TCP or a unix socket; a connection that
is upgraded (an engine's exec) is carried as it is.
"""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = 2**16


@dataclass
class Fault:
    """What happens to the next `times` requests that match. `request` is a pattern for `METHOD /path`.

    refuse  answered with `status` here; the server never sees the request
    lose    the server answers, the client gets `status` instead
    reset   the server answers, the client's connection is reset after `after` bytes of the answer
    cut     the client's connection is reset once `seen` (or `after` bytes) of the answer has passed
    hold    `after` bytes of the answer pass, and then nothing for as long as the client waits
    slow    the answer comes `piece` bytes at a time
    stall   the server answers, and nothing of it comes
    """

    kind: str
    request: str
    status: int = 503
    retry_after: str | None = None
    after: int = 0
    seen: bytes = b""
    piece: int = 1
    times: int = 1
    json: bool = False  # whether a refusal is in the words of the server's API, or a gateway's page
    hits: int = 0

    def matches(self, line: str) -> bool:
        return self.hits < self.times and re.match(self.request, line) is not None


@dataclass
class FaultProxy:
    connect: Callable  # -> (reader, writer) of the server
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    open: list[tuple[str, asyncio.StreamWriter]] = field(default_factory=list)

    def add(self, kind: str, request: str, **options) -> Fault:
        fault = Fault(kind, request, **options)
        self.faults.append(fault)
        return fault

    def count(self, pattern: str) -> int:
        """How many requests came that match, whatever became of them."""
        return sum(re.match(pattern, line) is not None for line in self.requests)

    def drop(self, pattern: str) -> int:
        """Reset the connections of requests that are being answered now; how many there were."""
        dropped = [writer for line, writer in self.open if re.match(pattern, line)]
        for writer in dropped:
            _reset(writer)
        return len(dropped)

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = " ".join(head.split(b"\r\n", 1)[0].decode().split()[:2])
            self.requests.append(line)
            self.heads.append(head.decode("latin-1"))
            fault = next((one for one in self.faults if one.matches(line)), None)
            if fault is not None:
                fault.hits += 1
            if fault is not None and fault.kind == "refuse":
                await _drained(reader, head)
                writer.write(_answer(fault))
            else:
                self.open.append((line, writer))
                try:
                    await self._carried(head, reader, writer, fault)
                finally:
                    self.open.remove((line, writer))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()

    async def _carried(self, head, reader, writer, fault):
        up_reader, up_writer = await self.connect()
        upgraded = re.search(rb"(?i)\r\nupgrade:", head) is not None
        up_writer.write(head if upgraded else _closing(head))
        feeding = asyncio.create_task(_copy(reader, up_writer, half_close=upgraded))
        try:
            if fault is None:
                await _copy(up_reader, writer, head=None if upgraded else _closing)
            else:
                await _broken(up_reader, writer, fault)
        finally:
            feeding.cancel()
            up_writer.close()


async def _broken(server, client, fault):
    if fault.kind in ("lose", "stall"):
        await server.read(-1)
        if fault.kind == "stall":
            await asyncio.sleep(3600)
        client.write(_answer(fault))
        return
    if fault.kind == "reset" and not fault.after:
        await server.read(-1)
        _reset(client)
        return
    client.write(_closing(await server.readuntil(b"\r\n\r\n")))
    passed = b""
    while data := await server.read(fault.piece if fault.kind == "slow" else 2**16):
        passed += data
        if fault.kind == "slow":
            client.write(data)
            await client.drain()
            await asyncio.sleep(0)
            continue
        rest = fault.after - (len(passed) - len(data))
        client.write(data[: max(0, rest)] if fault.after else data)
        await client.drain()
        if fault.kind == "hold":
            if len(passed) >= fault.after:
                await asyncio.sleep(3600)
        elif (fault.after and len(passed) >= fault.after) or (fault.seen and fault.seen in passed):
            await asyncio.sleep(0.05)  # what was passed is to arrive before the reset
            _reset(client)
            return


async def _copy(reader, writer, *, half_close=False, head=None):
    with contextlib.suppress(ConnectionError):
        if head is not None:
            writer.write(head(await reader.readuntil(b"\r\n\r\n")))
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        if half_close and writer.can_write_eof():
            writer.write_eof()


async def _drained(reader, head):
    """A request's body is taken in before it is refused: an early close would be a reset."""
    size = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if size:
        await reader.readexactly(int(size[1]))
    elif re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        await reader.readuntil(b"0\r\n\r\n")


def _closing(head):
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


def _answer(fault):
    retry = f"Retry-After: {fault.retry_after}\r\n" if fault.retry_after is not None else ""
    page = b'{"code": %d, "message": "not now"}' % fault.status if fault.json else b"<html>a gateway speaks</html>"
    return (
        f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: {'application/json' if fault.json else 'text/html'}\r\n{retry}"
        f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
    ).encode() + page


def _reset(writer):
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def fault_proxy(target: str, place: Path | None = None):
    """(proxy, its address) in front of `http://host:port` or `unix:///path`; for the latter `place` is where its socket goes."""
    if target.startswith("unix://"):
        path = target.removeprefix("unix://")
        proxy = FaultProxy(lambda: asyncio.open_unix_connection(path))
        server = await asyncio.start_unix_server(proxy.serve, str(place), limit=_HEAD)
        address = f"unix://{place}"
    else:
        host, port = target.removeprefix("http://").rsplit(":", 1)
        proxy = FaultProxy(lambda: asyncio.open_connection(host, int(port)))
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_HEAD)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy, address
    finally:
        server.close()
