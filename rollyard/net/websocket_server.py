"""`SocketProtocol`: uvicorn's WebSocket connection, made for one application that answers small frames quickly.

Plugged in by `uvicorn.Config(ws=SocketProtocol)`, it hands `EnvServer` a `Peer` in `scope["extensions"]` that reads and writes
frames without an ASGI message, a queue or a task for each. Under any other server the application works the same over plain
ASGI (`AsgiPeer`). Nothing here knows what frames mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from rollyard.net.websocket import WebSocketConnection

EXTENSION = "rollyard.peer"
_BACKLOG = 256 * 2**20  # a peer that reads nothing is dropped beyond this
_CLOSE_S = 10.0


class SocketProtocol(WebSocketConnection):
    """One connection, and the `Peer` at its other end."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        self._server = ServerProtocol(max_size=config.ws_max_size)
        super().__init__(self._server)
        self.subprotocols: Sequence[str] = ()
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._asked: Request | None = None
        self._query: dict[str, list[str]] = {}

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._state.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn's word for going away."""
        self._hang_up(1012)

    # the application's side

    def query(self, name: str) -> str | None:
        return self._query.get(name, [None])[0]

    async def accept(self, subprotocol: str | None = None) -> None:
        assert self._asked is not None
        if self._gone:  # it said goodbye, or what is no frame, right behind its handshake
            return
        response = self._server.accept(self._asked)
        if subprotocol is not None and response.status_code == 101:
            response.headers["Sec-WebSocket-Protocol"] = subprotocol
        self._server.send_response(response)
        self._flush()
        if response.status_code != 101:
            self._end()
            return
        every: float = self._config.ws_ping_interval or 0.0
        if every:
            self._ping(every, self._config.ws_ping_timeout or float("inf"))

    async def receive(self) -> bytes | None:
        while not self._messages and not self._gone:
            await self._wait()
        return self._messages.popleft() if self._messages else None

    async def for_each_message(self, heard: Callable[[bytes], None]) -> None:
        self._heard = heard
        while self._messages:
            heard(self._messages.popleft())
        while not self._gone:
            await self._wait()

    async def close(self, code: int = 1000) -> None:
        if self._gone:
            return
        self._server.send_close(code)
        self._flush()
        try:
            async with asyncio.timeout(_CLOSE_S):  # for the peer's own close frame
                while not self._gone:
                    await self.receive()
        except TimeoutError:
            self._end()

    # inside

    def _opening(self, event: Any) -> None:
        self._asked = event
        path, _, query = event.path.partition("?")
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in event.headers.raw_items()]
        offered = ",".join(event.headers.get_all("Sec-WebSocket-Protocol"))
        self.subprotocols = [word.strip() for word in offered.split(",") if word.strip()]
        self._query = parse_qs(query)
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": unquote(path),
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": self._config.root_path,
            "headers": headers,
            "subprotocols": self.subprotocols,
            "state": self._app_state.copy(),
            "extensions": {EXTENSION: self},
        }
        task = asyncio.get_running_loop().create_task(self._run(scope))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._config.loaded_app(scope, self._asgi_receive, self._asgi_send)
        finally:
            if not self._gone:
                self._hang_up(1011)

    async def _asgi_receive(self) -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def _asgi_send(self, message: Any) -> None:
        """Only a refusal comes this way: what is accepted is spoken to as a `Peer`."""
        if message["type"] == "websocket.close" and not self._gone and self._server.state is State.CONNECTING:
            self._server.send_response(self._server.reject(403, ""))
            self._flush()
            self._end()

    def _write(self, data: bytes) -> None:
        super()._write(data)
        if self._transport is not None and self._transport.get_write_buffer_size() > _BACKLOG:
            self.abort()
