"""One HTTP request or WebSocket passed on to a server at the other end of a byte stream, and its answer passed back.

Both directions stream: nothing is collected, nothing is cut. A request body over the limit is refused with 413, and an answer
that breaks off ends the connection, so that a part is not taken for the whole. Where to connect is decided before this is
called; no header or query of the request is looked at for it. Silent event streams get a comment line now and then, which
keeps proxies on the way from giving up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import httptools
import msgspec
from starlette.types import Message, Receive, Scope, Send

from rollyard.core.errors import PlaneTooLarge, PlaneUnavailable
from rollyard.core.protocols import ByteStream

Headers = list[tuple[bytes, bytes]]
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
)
# ours, or about the way here: none of the instance's business, and some of them secrets
_OURS = frozenset((b"authorization", b"host", b"forwarded", b"x-api-key", b"x-real-ip", b"content-length"))
# a page of an instance must not act as a page of the plane: it gets an origin of its own
_CONFINED = (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-downloads allow-popups")
_PATH_OR_DOMAIN = re.compile(rb";\s*(path|domain)=[^;]*", re.IGNORECASE)


class ForwardLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_body: int = 64 * 2**20
    max_message: int = 16 * 2**20  # of a WebSocket
    head_s: float = 600.0  # until an answer begins
    idle_s: float = 3600.0  # between two parts of one
    beat_s: float = 15.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is raw, with its query; `prefix` is what the caller's path had before it."""

    port: int
    path: bytes
    prefix: bytes = b""


async def forward_http(
    scope: Scope, receive: Receive, send: Send, stream: ByteStream, target: Target, limits: ForwardLimits
) -> None:
    """Raises before anything was answered; after that, a broken answer ends the connection."""
    exchange = _Exchange(scope, receive, send, stream, target, limits)
    asking, answering = asyncio.create_task(exchange.ask()), asyncio.create_task(exchange.answer())
    try:
        await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return asking.result()  # the caller has gone, or sent too much
    finally:
        for task in (asking, answering):
            task.cancel()
        await asyncio.gather(asking, answering, return_exceptions=True)


def pass_headers(headers: Iterable[tuple[bytes, bytes]], target: Target) -> Headers:
    """The caller's headers without those of the connection, of the plane, or of anything that was on the way."""
    found = list(headers)
    named = {word.strip().lower() for name, value in found if name == b"connection" for word in value.split(b",")}
    dropped = _HOP | _OURS | named
    kept = [(name, value) for name, value in found if name not in dropped and not name.startswith(b"x-forwarded-")]
    return [
        (b"host", b"127.0.0.1:%d" % target.port),
        *kept,
        *([(b"x-forwarded-prefix", target.prefix)] if target.prefix else []),
    ]


class _Exchange:
    def __init__(
        self, scope: Scope, receive: Receive, send: Send, stream: ByteStream, target: Target, limits: ForwardLimits
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._stream, self._target, self._limits = stream, target, limits
        self._gone = False

    # the caller's request

    async def ask(self) -> None:
        """Returns when the caller has gone; until then the answer may take its time."""
        length = _length(self._scope["headers"])
        if length is not None and length > self._limits.max_body:
            raise self._too_large()
        chunked = length is None and _has(self._scope["headers"], b"transfer-encoding")
        framing = [(b"transfer-encoding", b"chunked")] if chunked else []
        if length is not None:
            framing = [(b"content-length", b"%d" % length)]
        headers = [*pass_headers(self._scope["headers"], self._target), *framing, (b"connection", b"close")]
        line = b"%s %s HTTP/1.1\r\n" % (self._scope["method"].encode(), self._target.path)
        await self._stream.send(line + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n")
        async for part in self._parts():
            await self._stream.send(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
        if chunked and not self._gone:
            await self._stream.send(b"0\r\n\r\n")
        while not self._gone:
            self._gone = (await self._receive())["type"] == "http.disconnect"

    async def _parts(self) -> AsyncGenerator[bytes]:
        size, more = 0, True
        while more:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                return
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > self._limits.max_body:
                raise self._too_large()
            if part:
                yield part

    def _too_large(self) -> PlaneTooLarge:
        return PlaneTooLarge(f"the body is larger than {self._limits.max_body} bytes", hint="send it in parts")

    # the instance's answer

    async def answer(self) -> None:
        reading = _Reading(head_only=self._scope["method"] == "HEAD")
        while not reading.head:
            async with asyncio.timeout(self._limits.head_s):
                reading.feed(await self._stream.receive())
        status, headers = reading.status, reading.headers
        beats = b"text/event-stream" in _value(headers, b"content-type") and not _has(headers, b"content-encoding")
        await self._send({"type": "http.response.start", "status": status, "headers": self._show(headers)})
        await self._body(reading, beats)

    async def _body(self, reading: _Reading, beats: bool) -> None:
        between = True  # between two events, where a comment harms nothing
        while True:
            part = reading.take()
            if part:
                between = part.endswith((b"\n\n", b"\r\n\r\n"))
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            if reading.over:
                break
            if not beats:
                async with asyncio.timeout(self._limits.idle_s):
                    reading.feed(await self._stream.receive())
                continue
            more = asyncio.ensure_future(self._stream.receive())
            try:
                while not (await asyncio.wait({more}, timeout=self._limits.beat_s))[0]:
                    if between:
                        await self._send({"type": "http.response.body", "body": b": \n\n", "more_body": True})
                reading.feed(more.result())
            finally:
                more.cancel()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _show(self, headers: Headers) -> Headers:
        prefix = self._target.prefix
        shown: Headers = [_CONFINED] if prefix else []
        for name, value in headers:
            if name in _HOP or name in (b"server", b"date"):
                continue
            if prefix and name == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
                value = prefix + value
            if prefix and name == b"set-cookie":
                value = _PATH_OR_DOMAIN.sub(b"", value) + b"; Path=" + prefix + b"/"
            shown.append((name, value))
        return shown


class _Reading:
    """An HTTP/1.1 answer as it comes in."""

    def __init__(self, *, head_only: bool) -> None:
        self.status, self.head, self.over = 0, False, False
        self.headers: Headers = []
        self._head_only, self._framed = head_only, False
        self._parts: list[bytes] = []
        self._parser: Any = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        if not data:
            if not self.head or self._framed:
                raise PlaneUnavailable("the instance broke off its answer")
            self.over = True
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise PlaneUnavailable("the instance changed the protocol unasked") from error
        except httptools.HttpParserError as error:
            raise PlaneUnavailable("the instance's answer is not HTTP") from error

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)

    # what the parser calls

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.status, self.head = status, True
        self._framed = _has(self.headers, b"content-length") or _has(self.headers, b"transfer-encoding")
        if self._head_only or status in (204, 304):
            self.over = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.over = self.over or self.head


def _has(headers: Headers, name: bytes) -> bool:
    return any(found == name for found, _ in headers)


def _value(headers: Headers, name: bytes) -> bytes:
    return next((value for found, value in headers if found == name), b"")


def _length(headers: Headers) -> int | None:
    text = _value(headers, b"content-length")
    return int(text) if text.isdigit() else None
