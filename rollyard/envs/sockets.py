"""`WebSocketPeer`: the other end of one WebSocket, as the environments' wires use it; `AsgiPeer` is one over any ASGI server.

Sending never waits: a peer has few requests under way, so what can pile up for it is bounded. A peer that is gone takes
everything and tells nothing; its reader learns by None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send


class WebSocketPeer(Protocol):
    subprotocols: Sequence[str]

    def query(self, name: str) -> str | None: ...
    async def accept(self, subprotocol: str | None = None) -> None: ...
    def send(self, text: bytes) -> None: ...
    async def receive(self) -> str | bytes | None: ...
    async def for_each_message(self, heard: Callable[[str | bytes], None]) -> None:
        """Call `heard` with every message until the peer is gone."""
        ...

    async def close(self, code: int = 1000) -> None: ...


class AsgiPeer:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.subprotocols: Sequence[str] = scope.get("subprotocols", ())
        self._query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        self._receive = receive
        self._send = send
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._gone = False

    def query(self, name: str) -> str | None:
        return self._query.get(name, [None])[0]

    async def accept(self, subprotocol: str | None = None) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def send(self, text: bytes) -> None:
        if not self._gone:
            self._outgoing.put_nowait(text)

    async def receive(self) -> str | bytes | None:
        message: Any = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._end()
            return None
        text = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def for_each_message(self, heard: Callable[[str | bytes], None]) -> None:
        while (text := await self.receive()) is not None:
            heard(text)

    async def close(self, code: int = 1000) -> None:
        if self._gone:
            return
        if self._writer is not None and not self._writer.done():
            await self._outgoing.join()
        self._end()
        try:
            await self._send({"type": "websocket.close", "code": code})
        except (OSError, RuntimeError):
            return  # it left first: RuntimeError is how servers name a send after that

    def _end(self) -> None:
        self._gone = True
        if self._writer is not None:
            self._writer.cancel()

    async def _write(self) -> None:
        while True:
            text = await self._outgoing.get()
            try:
                await self._send({"type": "websocket.send", "text": text.decode()})
            except (OSError, RuntimeError):
                self._gone = True
            finally:
                self._outgoing.task_done()
