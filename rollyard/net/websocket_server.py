"""`SocketProtocol`: uvicorn's WebSocket connection, made for one application that answers small frames quickly.

Plugged in by `uvicorn.Config(ws=SocketProtocol)`, it hands `EnvServer` a `Peer` in `scope["extensions"]` that reads and writes
frames without an ASGI message, a queue or a task for each. Under any other server the application works the same over plain
ASGI (`AsgiPeer`). Nothing here knows what frames mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import parse_qs, unquote

from rollyard.net.websocket import BINARY, CLOSE, PING, PONG, TEXT, Broken, WebSocketReader, accept_key, closing, frame

EXTENSION = "rollyard.peer"
_BACKLOG = 256 * 2**20  # a peer that reads nothing is dropped beyond this
_CLOSE_S = 10.0


class SocketProtocol(asyncio.Protocol):
    """One connection, and the `Peer` at its other end."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        self.subprotocols: Sequence[str] = ()
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._reader = WebSocketReader(masked=True, limit=config.ws_max_size)
        self._transport: asyncio.Transport | None = None
        self._query: dict[str, list[str]] = {}
        self._key = b""
        self._accepted = False
        self._gone = False
        self._heard: Callable[[bytes], None] | None = None
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self._pinging: asyncio.TimerHandle | None = None

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._state.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._end()

    def eof_received(self) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        if not self._key:
            self._request(data)
            return
        try:
            for opcode, payload in self._reader.feed(data):
                if opcode in (TEXT, BINARY):
                    self._take(payload)
                elif opcode == PING:
                    self._write(frame(PONG, payload))
                elif opcode == CLOSE:
                    self._hang_up(payload)
                    return
        except Broken as error:
            self._hang_up(closing(error.code, str(error)))
        self._last = time.monotonic()

    def shutdown(self) -> None:
        """uvicorn's word for going away."""
        if self._accepted:
            self._hang_up(closing(1012))
        elif self._transport is not None:
            self._transport.close()

    # -- the application's side

    def query(self, name: str) -> str | None:
        return self._query.get(name, [None])[0]

    async def accept(self, subprotocol: str | None = None) -> None:
        chosen = b"" if subprotocol is None else b"Sec-WebSocket-Protocol: %b\r\n" % subprotocol.encode()
        self._write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n%b\r\n" % (accept_key(self._key), chosen)
        )
        self._accepted = True
        self._last = time.monotonic()
        if self._config.ws_ping_interval:
            self._ping()

    def send(self, text: bytes) -> None:
        self._write(frame(TEXT, text))

    async def receive(self) -> bytes | None:
        while not self._messages and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft() if self._messages else None

    async def each(self, heard: Callable[[bytes], None]) -> None:
        self._heard = heard
        while self._messages:
            heard(self._messages.popleft())
        while not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def close(self, code: int = 1000) -> None:
        if self._gone:
            return
        self._write(frame(CLOSE, closing(code)))
        try:
            async with asyncio.timeout(_CLOSE_S):  # for the peer's own close frame
                while not self._gone:
                    await self.receive()
        except TimeoutError:
            self._hang_up(None)

    # -- inside

    def _request(self, data: bytes) -> None:
        """uvicorn's HTTP parser has read the request; it comes here whole and well-formed."""
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        target = lines[0].split(b" ")[1]
        headers = [(n.lower(), v) for n, _, v in (line.partition(b": ") for line in lines[1:])]
        named = dict(headers)
        path, _, query = target.partition(b"?")
        self._key = named.get(b"sec-websocket-key", b"")
        if not self._key or named.get(b"sec-websocket-version") != b"13":
            self._refuse(b"400 Bad Request", b"not a WebSocket of version 13")
            return
        offered = b",".join(v for n, v in headers if n == b"sec-websocket-protocol").decode("latin-1")
        self.subprotocols = [word.strip() for word in offered.split(",") if word.strip()]
        self._query = parse_qs(query.decode("latin-1"))
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": unquote(path.decode("ascii", "replace")),
            "raw_path": path,
            "query_string": query,
            "root_path": self._config.root_path,
            "headers": headers,
            "subprotocols": self.subprotocols,
            "state": self._app_state.copy(),
            "extensions": {EXTENSION: self},
        }
        task = asyncio.get_running_loop().create_task(self._run(scope))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        if rest:
            self.data_received(rest)

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._config.loaded_app(scope, self._asgi_receive, self._asgi_send)
        finally:
            if not self._gone:
                self._hang_up(closing(1011) if self._accepted else None)

    async def _asgi_receive(self) -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def _asgi_send(self, message: Any) -> None:
        """Only a refusal comes this way: what is accepted is spoken to as a `Peer`."""
        if message["type"] == "websocket.close" and not self._accepted:
            self._refuse(b"403 Forbidden", b"")

    def _take(self, payload: bytes) -> None:
        if self._heard is not None:
            self._heard(payload)
            return
        self._messages.append(payload)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._gone or self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _BACKLOG:
            self._transport.abort()

    def _refuse(self, status: bytes, why: bytes) -> None:
        self._write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(why), why))
        self._end()

    def _hang_up(self, payload: bytes | None) -> None:
        if payload is not None:
            self._write(frame(CLOSE, payload))
        self._end()

    def _end(self) -> None:
        if not self._gone:
            self._gone = True
            if self._pinging is not None:
                self._pinging.cancel()
            if self._transport is not None:
                self._transport.close()
        self._wake()

    def _ping(self) -> None:
        """A peer that said nothing since the last ping, for longer than the time it has to answer, is gone."""
        idle = time.monotonic() - self._last
        every: float = self._config.ws_ping_interval
        if idle > every + (self._config.ws_ping_timeout or float("inf")):
            self._end()
            return
        if idle >= every / 2:
            self._write(frame(PING, b""))
        self._pinging = asyncio.get_running_loop().call_later(every, self._ping)
