"""An ASGI application answering one `Exchange`: how the admin API and trainer-side tools are served beside the hot path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from rollyard.core.log import Log
from rollyard.net.exchange import Exchange

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_log = Log("rollyard.gate")
_OURS = frozenset((b"content-length", b"transfer-encoding", b"connection"))


class App(Protocol):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Mounted(App, Protocol):
    """An application that a session owns until it closes (its tools)."""

    async def aclose(self) -> None: ...


async def run(app: App, exchange: Exchange, *, path: str, state: dict[str, Any]) -> None:
    """`state` reaches the application as `scope["state"]`; it is how a tool learns whose rollout calls it."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": exchange.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8"),
        "query_string": exchange.query,
        "root_path": "",
        "headers": list(exchange.headers.items()),
        "client": None,
        "server": None,
        "state": state,
    }
    bridge = _Bridge(exchange)
    try:
        await app(scope, bridge.receive, bridge.send)
    except Exception as error:  # noqa: BLE001 - an application's bug must not take the gate down; it is logged and answered
        if exchange.gone:
            return
        _log.error("the application at %s failed", path, exc_info=error)
        if not exchange.head_sent:
            exchange.respond(500, b'{"error":"the gate failed"}')
        else:
            exchange.abort()
        return
    if not exchange.answered:
        if exchange.head_sent:
            exchange.finish()
        else:
            exchange.respond(500, b'{"error":"no answer"}')


class _Bridge:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._given = False
        self._gone = asyncio.Event()
        self._head: tuple[int, bytes] | None = None  # held back: with the body whole, its length is known
        exchange.left = self._gone.set

    async def receive(self) -> Event:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._exchange.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Event) -> None:
        exchange = self._exchange
        if exchange.gone:
            raise OSError("the reader is gone")
        if event["type"] == "http.response.start":
            lines = [b"%b: %b\r\n" % (k, v) for k, v in event.get("headers", ()) if k.lower() not in _OURS]
            self._head = (event["status"], b"".join(lines))
            if any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in event["headers"]):
                self._begin()  # its first event may be far away
            return
        body: bytes = event.get("body", b"")
        if not event.get("more_body", False):
            if self._head is not None:
                exchange.respond(self._head[0], body, kind=None, extra=self._head[1])
            else:
                exchange.finish(body)
            self._gone.set()
            return
        if self._head is not None:
            self._begin()
        exchange.send(body)
        await exchange.drain()

    def _begin(self) -> None:
        assert self._head is not None
        (status, lines), self._head = self._head, None
        self._exchange.start(status, kind=None, extra=lines)
