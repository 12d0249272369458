"""Whole requests over kept connections: the client side of one model server, and nothing more.

It sends one request, waits for one complete answer, and keeps the connection. No redirects, no cookies, no proxies, no
retries, no streaming: a policy wants none of them, and without them a call costs a quarter of what a general client takes.
A connection that was idle for `idle_s` is not used again: the server may be closing it at this very moment.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httptools

MAX_HEAD = 256 * 1024  # of an answer, before its body
MAX_ORIGINS = 256  # addresses whose parts are remembered
_SAFE = "/:@!$&'()*+,;=%~-._?"


class BadAnswer(Exception):
    """The server's bytes are no answer; the message is ours and holds nothing of them."""


class HttpResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpOrigin(NamedTuple):
    """Where a url leads."""

    secure: bool
    host: str
    port: int
    head: str  # target and host header


class HttpPool:
    def __init__(self, *, connect_s: float, idle_s: float, max_body: int) -> None:
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._max_body = max_body
        self._idle: dict[tuple[bool, str, int], list[HttpClientConnection]] = {}
        self._origins: dict[str, HttpOrigin] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._asked: dict[HttpClientConnection, float] = {}  # those that wait for an answer, each with its deadline
        self._due = math.inf  # the earliest of them, or one before it: when `_timer` goes off
        self._timer: asyncio.TimerHandle | None = None
        self._secure: ssl.SSLContext | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first exchange, and of all

    async def exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], total_s: float
    ) -> HttpResponse:
        """Raises TimeoutError, OSError or `BadAnswer`; a cancelled exchange cuts its connection."""
        origin = self._origin(url)
        loop = self._loop = self._loop or asyncio.get_running_loop()
        now = loop.time()
        connection = self._reuse(origin, now) or await self._open(origin)
        self._limit(connection, now + total_s, loop)
        try:
            answer = await connection.send(_request(method, origin, body or b"", headers), loop)
        except BaseException:  # cancelled too: an unread answer would be the next one's
            connection.abort()
            raise
        finally:
            del self._asked[connection]
        self._keep(origin, connection, loop)
        return _decompress(answer, self._max_body)

    async def aclose(self) -> None:
        self._closed = True
        for timer in (self._sweeper, self._timer):
            if timer is not None:
                timer.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    def _origin(self, url: str) -> HttpOrigin:
        origin = self._origins.get(url)
        if origin is None:
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            host = parts.hostname or ""
            port = parts.port or (443 if secure else 80)
            target = quote(parts.path or "/", safe=_SAFE) + (
                "?" + quote(parts.query, safe=_SAFE) if parts.query else ""
            )
            origin = HttpOrigin(secure, host, port, f"{target} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n")
            if len(self._origins) >= MAX_ORIGINS:
                self._origins.clear()
            self._origins[url] = origin
        return origin

    async def _open(self, origin: HttpOrigin) -> HttpClientConnection:
        if self._closed:
            raise BadAnswer("this pool is closed")
        secure = None
        if origin.secure:
            self._secure = secure = self._secure or ssl.create_default_context()
        async with asyncio.timeout(self._connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: HttpClientConnection(self._forget, self._max_body),
                origin.host,
                origin.port,
                ssl=secure,
                server_hostname=origin.host if origin.secure else None,
            )
        return connection

    def _limit(self, connection: HttpClientConnection, deadline: float, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all that wait: one for each would cost as much as the parsing of its answer."""
        self._asked[connection] = deadline
        if deadline < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due, self._timer = deadline, loop.call_at(deadline, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection, deadline in self._asked.items():
            if deadline <= now:
                connection.expire()
        self._due = min((deadline for deadline in self._asked.values() if deadline > now), default=math.inf)
        self._timer = None if self._due == math.inf else loop.call_at(self._due, self._expire, loop)

    def _reuse(self, origin: HttpOrigin, now: float) -> HttpClientConnection | None:
        connections = self._idle.get(origin[:3])
        while connections:
            connection = connections.pop()
            if connection.usable and now - connection.idle_since < self._idle_s:
                return connection
            connection.abort()
        return None

    def _keep(self, origin: HttpOrigin, connection: HttpClientConnection, loop: asyncio.AbstractEventLoop) -> None:
        if not connection.usable or self._closed:
            connection.abort()
            return
        connection.idle_since = loop.time()
        connection.origin = origin[:3]
        self._idle.setdefault(origin[:3], []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep, loop)

    def _forget(self, connection: HttpClientConnection) -> None:
        connections = self._idle.get(connection.origin) if connection.origin is not None else None
        if connections and connection in connections:
            connections.remove(connection)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for key, connections in list(self._idle.items()):
            old = [connection for connection in connections if now - connection.idle_since >= self._idle_s]
            self._idle[key] = [connection for connection in connections if now - connection.idle_since < self._idle_s]
            for connection in old:
                connection.abort()
        self._idle = {key: connections for key, connections in self._idle.items() if connections}
        self._sweeper = loop.call_later(self._idle_s, self._sweep, loop) if self._idle else None


class HttpClientConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, lost: Callable[[HttpClientConnection], None], max_body: int) -> None:
        self.idle_since = 0.0
        self.origin: tuple[bool, str, int] | None = None
        self.usable = True
        self._lost = lost
        self._max_body = max_body
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._head_size = 0
        self._head_complete = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._until_eof = False

    def send(self, data: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[HttpResponse]:
        """The future of its answer. Once that is done the connection may send again."""
        self._waiter = waiter = loop.create_future()
        self._transport.write(data)
        return waiter

    def expire(self) -> None:
        self._fail(TimeoutError())

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._until_eof and exc is None:
            self._complete()
        self._fail(ConnectionResetError("the server closed the connection"))
        self._parser = None
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # bytes that were not asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(BadAnswer("not HTTP"))
            self.abort()
            return
        if not self._head_complete and not self._waiter.done():  # the parser holds a header until that is whole
            self._count_head(len(data))

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            self._fail(BadAnswer("its headers are too large"))
            self.abort()

    # -- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:  # after a body in chunks
            self._count_head(len(name) + len(value))
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._head_complete = True
        headers = self._headers
        self._until_eof = (
            "content-length" not in headers and "transfer-encoding" not in headers and self._status not in (204, 304)
        )

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_body:
            self._fail(BadAnswer("too large"))
            self.abort()
            return
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if 100 <= self._status < 200:
            self._reset()
            return
        self._until_eof = False
        if not self._parser.should_keep_alive():
            self.usable = False
        self._complete()

    def _complete(self) -> None:
        pieces = self._pieces
        answer = HttpResponse(self._status, self._headers, pieces[0] if len(pieces) == 1 else b"".join(pieces))
        self._reset()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)


def _request(method: str, origin: HttpOrigin, body: bytes, headers: Mapping[str, str]) -> bytes:
    return b"%b%d\r\n\r\n%b" % (_head(method, origin.head, tuple(headers.items())), len(body), body)


@lru_cache(maxsize=4096)
def _head(method: str, target: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    """A request up to its length: the same for every call of a rollout."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise BadAnswer("a header holds a line break")
    return f"{method} {target}{lines}accept-encoding: identity\r\ncontent-length: ".encode("latin-1")


def _decompress(answer: HttpResponse, max_body: int) -> HttpResponse:
    """Servers behind a compressing proxy may pack what was not asked to be packed."""
    packed = answer.headers.get("content-encoding", "identity").lower()
    if packed == "identity":
        return answer
    if packed not in ("gzip", "x-gzip", "deflate"):
        raise BadAnswer(f"packed as {packed[:20]!r}")
    opener = zlib.decompressobj(wbits=47)
    try:
        body = opener.decompress(answer.body, max_body)
    except zlib.error:
        raise BadAnswer("not what its content-encoding says") from None
    if opener.unconsumed_tail:
        del body  # an error that is kept keeps this frame
        raise BadAnswer("too large")
    return answer._replace(body=body)
