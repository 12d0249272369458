"""An ASGI application on listening sockets, by uvicorn, until a signal.

uvicorn bounds neither how long a request takes to arrive, how large its headers are, how long an answer waits for its reader, nor
how many connections there are. `GuardedHttp` does, by the limits that the gate's own connections have (`HttpLimits`). Bodies may
be large here (archives, snapshots), so they have a slowest rate in place of a time.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollyard.net.http_server import HttpLimits

SLOWEST = 1024  # bytes of a body a second
QUEUE = 2048  # connections that wait to be accepted


class Drain:
    """A server that is asked to stop sets `over` and goes on for `seconds`, so that load balancers see it before it goes.
    Asked twice, it stops at once."""

    def __init__(self, over: asyncio.Event, seconds: float) -> None:
        self.over, self.seconds = over, seconds


async def serve_app(
    app: Any, *sockets: socket.socket, drain: Drain | None = None, limits: HttpLimits | None = None, **settings: Any
) -> None:
    """Serve until SIGINT or SIGTERM; `settings` are uvicorn's own."""
    guard = partial(GuardedHttp, limits=limits or HttpLimits(), capacity=connection_limit())
    chosen: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "lifespan": "off",
        "http": guard,
        "backlog": accept_limit(),
        **settings,
    }
    config = uvicorn.Config(app, **chosen)
    await _Server(config, drain).serve(sockets=list(sockets))


def connection_limit() -> int:
    """Half of the descriptors that this process may have: the others are for its files, programs and own connections."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16)


def accept_limit() -> int:
    """How many connections the event loop accepts before it looks at any of them, which is when too many give way. It takes the
    length of the queue for it: where descriptors ran out, it tried, and told of, each place in turn, and did little else."""
    return min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 32, 4), QUEUE)


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's HTTP connection with a deadline for what is awaited from the other end, looked at by `tick`. Where there are too
    many connections, the one that has kept us waiting longest gives way."""

    def __init__(self, *args: Any, limits: HttpLimits, capacity: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits, self._capacity = limits, capacity
        self._unread: int | None = None  # bytes of the request under way since its beginning or the last of its body
        self._in_body = False  # whether what was just read held a part of a body
        self._stalled: float | None = None  # since when the reader has not read
        self.deadline: float | None = None  # for what has to arrive; None while a request is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others: list[GuardedHttp] = [c for c in self.connections if isinstance(c, GuardedHttp)]
        super().connection_made(transport)
        self.deadline = time.monotonic() + self._limits.headers_s
        if len(self.connections) > self._capacity:
            waiting = [(c.deadline, n) for n, c in enumerate(others) if c.deadline is not None]
            (others[min(waiting)[1]] if waiting else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        self._in_body = False
        super().data_received(data)
        if self._unread is not None and not self._in_body:
            self._unread += len(data)
            if self._unread > self._limits.header_bytes:
                self.send_400_response("The headers of this request are too large.")
                self._unread = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unread = 0
        self.deadline = time.monotonic() + self._limits.headers_s

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self._limits.header_count:
            raise ValueError("too many headers")  # the parser ends, and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.deadline = time.monotonic() + self._limits.body_s

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unread, self._in_body = 0, True
        if self.deadline is not None:
            self.deadline += len(body) / SLOWEST

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unread = self.deadline = None

    def tick(self, now: float) -> None:
        if self.flow.write_paused:
            self._stalled = now if self._stalled is None else self._stalled
            if now - self._stalled > self._limits.write_s:
                self.transport.abort()
            return
        self._stalled = None
        if self.flow.read_paused and self.deadline is not None:  # it is we who do not read
            self.deadline = now + self._limits.body_s
        elif self.deadline is not None and now > self.deadline:
            self.transport.abort()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, drain: Drain | None) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, GuardedHttp):
                connection.tick(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._drain is None or self._drain.over.is_set()
        if self._drain is not None:
            self._loop.call_soon_threadsafe(self._drain.over.set)
        if self._drain is not None and self._drain.seconds > 0 and not again:
            later = partial(super().handle_exit, sig, frame)
            self._loop.call_soon_threadsafe(self._loop.call_later, self._drain.seconds, later)
        else:
            super().handle_exit(sig, frame)
