"""One plain HTTP request through the proxy: read strictly, written anew for its server, and no byte more than its body.

Each request is judged by itself and its connection ends with its answer, so a redirect is a new request, and nothing can be
sent behind an allowed one in the hope that its server reads it as another.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from rollyard.core.protocols import ByteStream

MAX_HEAD = 64 * 1024
PIECE = 64 * 1024
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,30}")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_DROPPED = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"http2-settings"})
Send = Callable[[bytes], Awaitable[None]]


class MalformedRequest(Exception):
    """What was sent is not one plain request."""


class Incoming:
    """What a program sends, read ahead as far as it has to be looked at."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.data = bytearray()

    async def more(self) -> bool:
        piece = await self.stream.receive(PIECE)
        self.data += piece
        return bool(piece)

    async def until(self, mark: bytes, most: int) -> bytes:
        """Everything up to `mark`, which is taken away too."""
        while (at := self.data.find(mark)) < 0:
            if len(self.data) > most or not await self.more():
                raise MalformedRequest("no whole request")
        found = bytes(self.data[:at])
        del self.data[: at + len(mark)]
        return found

    async def forward(self, count: int, send: Send) -> None:
        """Exactly `count` bytes."""
        while count:
            if not self.data and not await self.more():
                raise MalformedRequest("the body ends early")
            piece = bytes(self.data[:count])
            del self.data[: len(piece)]
            await send(piece)
            count -= len(piece)

    async def rest(self, send: Send) -> None:
        """All that comes, until its end."""
        while self.data or await self.more():
            piece = bytes(self.data)
            self.data.clear()
            await send(piece)


class RequestHead(NamedTuple):
    method: str
    target: str
    headers: list[tuple[bytes, bytes]]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    @property
    def websocket(self) -> bool:
        return [value.lower() for value in self.values(b"upgrade")] == [b"websocket"]

    @property
    def length(self) -> int | None:
        """Bytes of the body; None when it comes in chunks."""
        lengths, codings = self.values(b"content-length"), self.values(b"transfer-encoding")
        if codings:
            if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
                raise MalformedRequest("a body whose length can be read in two ways")
            return None
        if len(lengths) > 1 or (lengths and not re.fullmatch(rb"\d{1,18}", lengths[0])):
            raise MalformedRequest("a body whose length can be read in two ways")
        return int(lengths[0]) if lengths else 0

    def authority(self, port: int) -> tuple[str, int]:
        """Host and port that it is for, `port` where it does not say. An absolute target and the header have to agree."""
        hosts = self.values(b"host")
        if len(hosts) > 1:
            raise MalformedRequest("several Host headers")
        named = hosts[0].decode("latin-1") if hosts else None
        if not self.target.startswith("/") and self.target != "*":
            try:
                parts = urlsplit(self.target)
            except ValueError as error:
                raise MalformedRequest("not the address of a plain HTTP request") from error
            if parts.scheme != "http" or parts.username is not None:
                raise MalformedRequest("not the address of a plain HTTP request")
            if named is not None and split_authority(named, 80) != split_authority(parts.netloc, 80):
                raise MalformedRequest("a Host header for another name than its target")
            return split_authority(parts.netloc, 80)
        if named is None:
            raise MalformedRequest("no Host header")
        return split_authority(named, port)

    def write(self) -> bytes:
        """As its server is sent it."""
        target = self.target
        if not target.startswith("/") and target != "*":
            parts = urlsplit(target)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = [
            key + b": " + value for key, value in self.headers if key not in _DROPPED and not key.startswith(b"proxy-")
        ]
        if not self.values(b"host"):
            kept.append(b"host: " + urlsplit(self.target).netloc.encode("latin-1"))
        kept += [b"connection: upgrade", b"upgrade: websocket"] if self.websocket else [b"connection: close"]
        line = f"{self.method} {target} HTTP/1.1".encode("latin-1")
        return b"\r\n".join([line, *kept, b"", b""])


def split_authority(text: str, port: int) -> tuple[str, int]:
    host, colon, number = text.rpartition(":")
    if not colon or number.endswith("]"):
        return text.lower(), port
    if not re.fullmatch(r"[0-9]{1,5}", number) or not 0 < int(number) < 65536:
        raise MalformedRequest(f"{text[:100]!r} names no port")
    return host.lower(), int(number)


def looks_like_http(data: bytes) -> bool:
    return re.match(rb"[A-Z][A-Z-]{0,30} ", data) is not None


def parse_head(data: bytes) -> RequestHead:
    first, *lines = data.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not _METHOD.fullmatch(words[0]) or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise MalformedRequest("not an HTTP/1 request")
    if not words[1] or re.search(rb"[^\x21-\x7e]", words[1]):
        raise MalformedRequest("odd characters in a target")
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        if (found := _HEADER.fullmatch(line)) is None:
            raise MalformedRequest("a header that two readers could read differently")
        headers.append((found[1].lower(), found[2]))
    return RequestHead(words[0].decode(), words[1].decode(), headers)


async def forward_body(head: RequestHead, incoming: Incoming, send: Send) -> None:
    if (length := head.length) is not None:
        await incoming.forward(length, send)
        return
    while True:
        line = await incoming.until(b"\r\n", 1024)
        size = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,12}", size):
            raise MalformedRequest("a chunk without a size")
        count = int(size, 16)
        await send(b"%x\r\n" % count)
        if count == 0:
            break
        await incoming.forward(count, send)
        if await incoming.until(b"\r\n", 2) != b"":
            raise MalformedRequest("a chunk of another size than it says")
        await send(b"\r\n")
    while await incoming.until(b"\r\n", MAX_HEAD):
        pass  # trailers stay here
    await send(b"\r\n")
