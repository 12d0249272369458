"""`Exchange`: one HTTP request and its answer, as a service sees them; `http_server` reads requests and owns the connection."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.net.http_server import HttpConnection

_STATUS = {int(s): f"HTTP/1.1 {int(s)} {s.phrase}\r\n".encode() for s in HTTPStatus}
JSON = b"application/json"


class Exchange:
    """One request and its answer. Writing to one whose reader is gone does nothing."""

    __slots__ = (
        "_chunked",
        "_pieces",
        "answered",
        "body",
        "body_limit",
        "connection",
        "context",
        "gone",
        "head_sent",
        "headers",
        "http_1_0",
        "keep_alive",
        "left",
        "method",
        "path",
        "query",
        "received",
        "status",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self.connection = connection
        self.method = ""
        self.path = ""
        self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.body_limit = 0
        self.received = 0
        self.keep_alive = True
        self.http_1_0 = False
        self.head_sent = False
        self.answered = False
        self.gone = False
        self.status = 0
        # Called once when the reader goes away before the answer is complete
        self.left: Callable[[], Any] | None = None
        self.context: Any = None  # whatever `begin` wants to find again in `complete`
        self._pieces: list[bytes] | None = None
        self._chunked = False

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def add(self, data: bytes) -> None:
        if not self.body:
            self.body = data
        elif self._pieces is None:
            self._pieces = [self.body, data]
        else:
            self._pieces.append(data)

    def join(self) -> None:
        if self._pieces is not None:
            self.body, self._pieces = b"".join(self._pieces), None

    def respond(self, status: int, body: bytes, *, kind: bytes | None = JSON, extra: bytes = b"") -> None:
        """The whole answer in one write. `extra` is complete header lines, each ending in CRLF."""
        if self.answered or self.gone:
            return
        self.head_sent = self.answered = True
        self.status = status
        head = b"%b%b%b%b%b\r\n" % (
            _STATUS.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
            b"" if kind is None else b"content-type: %b\r\n" % kind,
            b"" if status == 204 else b"content-length: %d\r\n" % len(body),
            extra,
            b"" if self.keep_alive else b"connection: close\r\n",
        )
        self.connection.write(head if self.method == "HEAD" else head + body)
        self.connection.finish(self)

    def start(self, status: int, *, kind: bytes | None = JSON, extra: bytes = b"") -> None:
        """Send the head now and the body in pieces."""
        if self.head_sent or self.gone:
            return
        self.head_sent = True
        self.status = status
        self._chunked = not self.http_1_0
        if self.http_1_0:
            self.keep_alive = False
        self.connection.write(
            b"%b%b%b%b%b\r\n"
            % (
                _STATUS.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
                b"content-type: %b\r\n" % kind if kind else b"",
                b"transfer-encoding: chunked\r\n" if self._chunked else b"",
                extra,
                b"" if self.keep_alive else b"connection: close\r\n",
            )
        )

    def send(self, data: bytes) -> None:
        if data and not self.answered and not self.gone and self.method != "HEAD":
            self.connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self, data: bytes = b"") -> None:
        if self.answered or self.gone:
            return
        self.send(data)
        self.answered = True
        if self._chunked:
            self.connection.write(b"0\r\n\r\n")
        self.connection.finish(self)

    def abort(self) -> None:
        """Cut the connection: the only honest end of a started answer that cannot be completed."""
        self.keep_alive = False
        self.connection.abort()

    async def drain(self) -> None:
        await self.connection.drain()
