"""A proxy with rules on this machine's loopback, a server behind it, and what programs may try to send."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from rollyard.core.egress import EgressRefusal
from rollyard.net.egress.proxy import WATCHER, EgressProxy
from rollyard.sandbox.streams import SocketListener

ALLOWED, WILD, ODD = "web.test", "*.wild.test", "rebound.test"


class Upstream:
    """A server that keeps what it is sent and answers every request with `answer`, unless a connection is not to be answered."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.connections = 0
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        self.closes = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answered = False
        try:
            while data := await reader.read(65536):
                self.got += data
                if not answered and b"\r\n\r\n" in self.got and self.answer:
                    answered = True
                    writer.write(self.answer)
                    if self.closes:
                        break
            await writer.drain()
        finally:
            writer.close()


class EgressFixture(NamedTuple):
    proxy: EgressProxy
    port: int  # of the proxy
    upstream: Upstream
    server: int  # the upstream's port
    refusals: list[EgressRefusal]
    asked: list[str]  # names that were looked up

    async def send(self, data: bytes) -> bytes:
        """What the proxy says to these bytes, until it hangs up or has nothing more to say."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(30):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


class HostPorts:
    """Listeners on this machine's loopback, in place of a sandbox's."""

    async def listen_at(self, address: str, port: int) -> SocketListener:
        sock = socket.create_server((address, port))
        return SocketListener(sock, sock.getsockname()[1])


@asynccontextmanager
async def egress_fixture(*rules: str, names: dict[str, list[str]] | None = None) -> AsyncIterator[EgressFixture]:
    """`{port}` in a rule is the upstream's."""
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    refusals: list[EgressRefusal] = []
    asked: list[str] = []

    async def tell(refusal: EgressRefusal) -> None:
        refusals.append(refusal)

    async def resolve(name: str) -> list[str]:
        asked.append(name)
        return (names or {}).get(name, [])

    token = WATCHER.set(tell)
    proxy = EgressProxy("sbx_test", [rule.format(port=port) for rule in rules], ports=HostPorts(), resolve=resolve)
    WATCHER.reset(token)
    sock = socket.create_server(("127.0.0.1", 0))
    listener = SocketListener(sock, sock.getsockname()[1])
    proxy.serve_proxy(listener)
    try:
        yield EgressFixture(proxy, listener.port, upstream, port, refusals, asked)
    finally:
        await proxy.aclose()
        server.close()


def client_hello(name: str | None) -> bytes:
    """What a real client sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def with_encrypted_hello(hello: bytes) -> bytes:
    """The same with an extension that hides the real name."""
    extension = struct.pack("!HH", 0xFE0D, 4) + b"\0\0\0\0"
    body = bytearray(hello)
    for at, width in ((3, 2), (6, 3)):
        length = int.from_bytes(body[at : at + width]) + len(extension)
        body[at : at + width] = length.to_bytes(width)
    at = 9 + 2 + 32
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2])
    at += 1 + body[at]
    body[at : at + 2] = (int.from_bytes(body[at : at + 2]) + len(extension)).to_bytes(2)
    return bytes(body) + extension


def in_records(hello: bytes, size: int) -> bytes:
    """The same message in many small records."""
    message = hello[5:]
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(hello[:3] + struct.pack("!H", len(piece)) + piece for piece in pieces)


def question(name: str, kind: int = 1, *, count: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!HHHHHH", 7, 0x0100, count, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
