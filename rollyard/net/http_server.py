"""HTTP/1.1 on one connection: bytes in, an `Exchange` out, an answer back. Nothing here knows about models or keys.

It exists beside ASGI because a call must be refused before its body is read, a disconnect must be seen while it waits, and
thousands of held calls must cost a few kilobytes each. There is no timer per request: the owner of the connections calls
`tick` once a second, and each connection compares the clock with its own deadline (slow headers, slow bodies, idle
connections, readers that never read).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec

from rollyard.net.exchange import Exchange

_ONCE = frozenset((b"authorization", b"x-api-key", b"x-goog-api-key", b"content-length", b"host", b"idempotency-key"))
_PIPELINE = 8  # requests waiting behind one that is being answered; no agent pipelines, so more is abuse
_HELD = 64 * 1024  # bytes kept unread behind one that is being answered; beyond them the connection is not read at all
_TOO_LARGE = "the request is too large"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds and bytes. `body` bounds every request on the connection; a session may ask for less."""

    headers_s: float = 10.0
    body_s: float = 120.0
    idle_s: float = 300.0
    write_s: float = 60.0
    linger_s: float = 5.0
    header_bytes: int = 32 * 1024
    header_count: int = 100
    body: int = 64 * 2**20


class HttpService(Protocol):
    """What answers the requests of a connection."""

    limits: HttpLimits

    def connected(self, connection: HttpConnection) -> bool: ...
    def lost(self, connection: HttpConnection) -> None: ...
    def begin(self, exchange: Exchange) -> None:
        """Headers are in. Refuse now by answering, or set `exchange.body_limit`."""
        ...

    def complete(self, exchange: Exchange) -> None:
        """The body is in. Answer now or later."""
        ...

    def refusal(self, exchange: Exchange, status: int, why: str) -> bytes:
        """The body of an error that HTTP itself makes necessary, in the shape this path's clients read."""
        ...


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "_count",
        "_deadline",
        "_held",
        "_held_bytes",
        "_incoming",
        "_now",
        "_parser",
        "_resting",
        "_size",
        "_transport",
        "_unadmitted",
        "_url",
        "_waiters",
        "_waiting",
        "current",
        "paused",
        "service",
    )

    def __init__(self, service: HttpService, now: Callable[[], float]) -> None:
        self.service = service
        self.current: Exchange | None = None  # the one being answered
        self.paused = False
        self._incoming: Exchange | None = None  # the one being read
        self._waiting: deque[Exchange] | None = None  # came in the same read as `current`, behind it
        # `_incoming` has its headers, and the service was not asked yet whether its body may be read
        self._unadmitted = False
        self._held: list[bytes] | None = None  # what came while `current` was being answered
        self._held_bytes = 0
        self._resting = False  # whether the transport was told to read no more
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._size = 0
        self._count = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._now = now
        self._deadline = now() + service.limits.headers_s

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if not self.service.connected(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.service.lost(self)
        self._parser = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        waiting = self._waiting or ()
        self._waiting = self._held = self._incoming = None
        for exchange in (self.current, *waiting):
            if exchange is not None and not exchange.gone:
                exchange.gone = True
                left, exchange.left = exchange.left, None
                if left is not None:
                    left()
        self.current = None

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if self.current is None:
            self._feed(data)
        else:
            self._hold_back(data)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unreadable("this server upgrades to nothing")
        except httptools.HttpParserError:
            self._unreadable("this is not a well-formed HTTP/1.1 request")

    def _hold_back(self, data: bytes) -> None:
        """Requests behind the one that is being answered wait unread. Up to a little more than one read of them is kept, so
        that a reader who leaves is still seen; beyond that the kernel keeps the sender waiting."""
        if self._held is None:
            self._held = []
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _HELD and not self._resting:
            self._resting = True
            self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    # -- the parser's side

    def on_message_begin(self) -> None:
        self._url = b""
        self._size = self._count = 0
        self._unadmitted = False
        self._incoming = Exchange(self)
        if self.current is None:
            self._deadline = self._now() + self.service.limits.headers_s

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self.service.limits.header_bytes:
            self._refuse(414, "the address is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._incoming
        if exchange is None or exchange.answered:
            return
        self._size += len(name) + len(value)
        self._count += 1
        limits = self.service.limits
        if self._size > limits.header_bytes or self._count > limits.header_count:
            self._refuse(431, "headers are too large")
            return
        name = name.lower()
        headers = exchange.headers
        if name in headers:
            if name in _ONCE:
                self._refuse(400, "a header that may come once came twice")
                return
            value = headers[name] + b", " + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        exchange = self._incoming
        if exchange is None or exchange.answered:
            return
        parser = self._parser
        exchange.method = parser.get_method().decode("ascii", "replace")
        exchange.keep_alive = parser.should_keep_alive()
        exchange.http_1_0 = parser.get_http_version() != "1.1"
        url = self._url
        if not url.startswith(b"/"):
            self._refuse(400, "the address must be a path")
            return
        path, _, exchange.query = url.partition(b"?")
        exchange.path = unquote(path.decode("latin-1")) if b"%" in path else path.decode("latin-1")
        exchange.body_limit = self.service.limits.body
        if self.current is None:
            self._admit(exchange)
        else:
            self._unadmitted = True

    def _admit(self, exchange: Exchange) -> None:
        """The headers are in and it is this request's turn: whether its body may be read."""
        self._unadmitted = False
        self.service.begin(exchange)
        if exchange.answered:
            self._deadline = self._now() + self.service.limits.linger_s
            return
        length = exchange.headers.get(b"content-length", b"0")
        if len(length) > 15 or int(length) > exchange.body_limit or exchange.received > exchange.body_limit:
            self._too_large()
            return
        if exchange.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._deadline = self._now() + self.service.limits.body_s

    def on_body(self, body: bytes) -> None:
        exchange = self._incoming
        if exchange is None or exchange.answered:
            return
        exchange.received += len(body)
        if exchange.received > exchange.body_limit:
            self._too_large()
            return
        exchange.add(body)

    def on_message_complete(self) -> None:
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            return
        if exchange.answered:
            self._transport.close()
            return
        exchange.join()
        if self.current is None:
            self._deadline = 0.0
            self.current = exchange
            self.service.complete(exchange)
            return
        if self._waiting is None:
            self._waiting = deque()
        if len(self._waiting) >= _PIPELINE:
            self.abort()
            return
        self._waiting.append(exchange)

    # -- the answer's side

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def finish(self, exchange: Exchange) -> None:
        """An answer is complete: close, or go on with the next request on this connection."""
        exchange.left = None
        if exchange is not self.current:
            return  # refused while it was still being read: the rest of it is read and thrown away
        self.current = None
        now = self._now()
        if not exchange.keep_alive or self._parser is None:
            self._transport.close()
            self._deadline = now + self.service.limits.write_s
            return
        self._deadline = now + self.service.limits.idle_s
        if self._waiting:
            self._serve_next(self._waiting.popleft())
        elif self._unadmitted and self._incoming is not None:
            self._admit(self._incoming)
        if self.current is None and self._held is not None:
            self._read_on()

    def _serve_next(self, exchange: Exchange) -> None:
        """A request that was read whole before its turn came."""
        self.current = exchange
        self.service.begin(exchange)
        if not exchange.answered and len(exchange.body) > exchange.body_limit:
            exchange.keep_alive = False
            exchange.respond(413, self.service.refusal(exchange, 413, _TOO_LARGE))
        if exchange.answered:
            self.current = None
            self._transport.close()
            return
        self._deadline = 0.0
        self.service.complete(exchange)

    def _read_on(self) -> None:
        """Nothing is being answered: read what was held, then whatever comes."""
        held, self._held, self._held_bytes = self._held or (), None, 0
        if self._resting:
            self._resting = False
            self._transport.resume_reading()
        for data in held:
            self.data_received(data)

    async def drain(self) -> None:
        """Wait while the reader is slower than we are; a reader that never reads is cut off by `tick`."""
        if self.paused and not self._transport.is_closing():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close once the answer under way, if any, is out."""
        if self.current is None:
            if self._transport is not None:
                self._transport.close()
        else:
            self.current.keep_alive = False

    def tick(self, now: float) -> None:
        if self.paused:
            if self._deadline <= 0.0:
                self._deadline = now + self.service.limits.write_s
            elif now > self._deadline:
                self.abort()
        elif self.current is not None and self._incoming is None:
            self._deadline = 0.0
        elif 0.0 < self._deadline < now:
            incoming = self._incoming
            if incoming is not None and not incoming.answered:
                self._refuse(408, "the request took too long to arrive")
            else:
                self.abort()

    def _unreadable(self, why: str) -> None:
        self._refuse(400, why)
        self._parser = None  # what follows cannot be told apart from an attack

    def _too_large(self) -> None:
        self._refuse(413, _TOO_LARGE)

    def _refuse(self, status: int, why: str) -> None:
        """Answer before the request is whole, then read and drop the rest for a moment: a client that is still sending
        must get to see the answer instead of a reset."""
        exchange = self._incoming
        if exchange is None:
            exchange = Exchange(self)
        exchange.keep_alive = False
        if self.current is None:
            exchange.respond(status, self.service.refusal(exchange, status, why))
            if self._transport.can_write_eof():
                self._transport.write_eof()
        exchange.answered = True
        self._incoming = exchange
        self._deadline = self._now() + self.service.limits.linger_s
