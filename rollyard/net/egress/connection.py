"""One connection of the egress proxy, once it is settled where it goes: bytes in both directions, and a look at what goes out.

TLS has to name the host that was asked for. Plain HTTP is carried one request to a connection, for that host alone. Anything
else passes only at a port that a rule names and that is not a port of the web.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from rollyard.core.egress import WEB_PORTS
from rollyard.core.protocols import ByteStream
from rollyard.net.egress.client_hello import ACCESS_DENIED, HANDSHAKE, MAX_HELLO, read_hello
from rollyard.net.egress.decide import Destination
from rollyard.net.egress.http_request import (
    MAX_HEAD,
    PIECE,
    Incoming,
    MalformedRequest,
    RequestHead,
    Send,
    forward_body,
    looks_like_http,
    parse_head,
)

HEAD_S = 30.0  # for the first words of a connection
_SWITCHING = b"HTTP/1.1 101"
Spoken = Literal["dns", "connect", "http", "tls", "tcp"]


class Refused(Exception):
    def __init__(self, protocol: Spoken, host: str, port: int | None, reason: str) -> None:
        super().__init__(reason)
        self.protocol: Spoken = protocol
        self.host, self.port, self.reason = host, port, reason


async def carry(
    incoming: Incoming,
    where: Destination,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    head: RequestHead | None = None,
) -> None:
    """Bytes in both directions; what goes out is looked at first, unless `head` was."""
    switched: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    downward = asyncio.create_task(_pump(reader, incoming.stream, switched))
    upward = asyncio.create_task(_send_up(incoming, where, writer, head, switched))
    try:
        await asyncio.wait([upward, downward], return_when=asyncio.FIRST_COMPLETED)
        if upward.done():
            upward.result()
        await downward  # an answer may outlast what was sent
    finally:
        for task in (upward, downward):
            task.cancel()
        await asyncio.gather(upward, downward, return_exceptions=True)
        writer.close()


async def _send_up(
    incoming: Incoming,
    where: Destination,
    writer: asyncio.StreamWriter,
    head: RequestHead | None,
    switched: asyncio.Future[bool],
) -> None:
    send = _sender(writer)
    if head is None and (incoming.data or await incoming.more()):
        if incoming.data[0] == HANDSHAKE:
            await _check_hello(incoming, where)
        elif looks_like_http(bytes(incoming.data[:32])):
            head = await _read_request(incoming, where)
        elif where.port in WEB_PORTS:
            raise Refused("tcp", where.host, where.port, "neither TLS nor HTTP")
    if head is not None:
        await send(head.write())
        if not head.websocket:
            await forward_body(head, incoming, send)
        if not head.websocket or not await switched:
            await incoming.rest(_discard)
            return
    await incoming.rest(send)
    writer.write_eof()


async def _check_hello(incoming: Incoming, where: Destination) -> None:
    try:
        async with asyncio.timeout(HEAD_S):
            while (hello := read_hello(bytes(incoming.data))) is None:
                if len(incoming.data) > MAX_HELLO or not await incoming.more():
                    raise ValueError("no whole ClientHello")
    except ValueError as error:
        raise Refused("tls", where.host, where.port, str(error)) from None
    name = (hello.name or "").lower().removesuffix(".")
    reason = None
    if hello.hidden:
        reason = "the name in TLS is encrypted (ECH)"
    elif where.named and name != where.host:
        reason = f"TLS for {name[:100]!r}" if name else "TLS without a name"
    elif not where.named and name:
        reason = f"TLS for {name[:100]!r} at an address"
    if reason is not None:
        await incoming.stream.send(ACCESS_DENIED)
        raise Refused("tls", where.host, where.port, reason)


async def _read_request(incoming: Incoming, where: Destination) -> RequestHead:
    """Read a plain request; its `Host` header has to name the host that the connection was allowed for."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = parse_head(await incoming.until(b"\r\n\r\n", MAX_HEAD))
        check_request(head)
        host, port = head.authority(where.port)
        if (host.removesuffix(".").strip("[]"), port) != (where.host, where.port):
            raise MalformedRequest(f"a request for {host[:100]}:{port}")
    except (MalformedRequest, ValueError) as error:
        await answer(incoming.stream, 403, str(error))
        raise Refused("http", where.host, where.port, str(error)) from None
    return head


def check_request(head: RequestHead) -> None:
    if head.method == "CONNECT":
        raise MalformedRequest("a proxy's request to a host")
    if head.length != 0 and head.websocket:
        raise MalformedRequest("a WebSocket's request with a body")


def _sender(writer: asyncio.StreamWriter) -> Send:
    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    return send


async def _discard(data: bytes) -> None:
    """Where bytes go that belong to no request."""


async def _pump(reader: asyncio.StreamReader, stream: ByteStream, switched: asyncio.Future[bool]) -> None:
    """What the host says. Whether it takes a WebSocket's request is in its first line."""
    begun = b""
    try:
        while piece := await reader.read(PIECE):
            if not switched.done():
                begun += piece
                if len(begun) >= len(_SWITCHING):
                    switched.set_result(begun.startswith(_SWITCHING))
            await stream.send(piece)
        await stream.send_eof()
    finally:
        if not switched.done():
            switched.set_result(False)


async def answer(stream: ByteStream, status: int, text: str) -> None:
    body = f"rollyard: {text}\n".encode()
    head = (
        f"HTTP/1.1 {status} -\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with contextlib.suppress(OSError):  # it left before the refusal was sent
        await stream.send(head.encode() + body)
