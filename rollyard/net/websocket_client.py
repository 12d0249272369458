"""A WebSocket as the environments' client needs it: light to import, cheap per message, over plain asyncio.

Where a proxy is configured and the server is not on loopback, `websocket_proxied` takes its place: it gets through one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.net.websocket import WebSocketConnection

LIMIT = 100 * 2**20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROXIES = ("all_proxy", "http_proxy", "https_proxy", "ws_proxy", "wss_proxy", "socks_proxy")


class Lost(Exception):
    """The connection is gone."""


class Socket(Protocol):
    subprotocol: str | None

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """From now on every message goes to `heard`, and the end of the connection to `lost`."""
        ...

    def send(self, text: bytes) -> None: ...
    async def recv(self) -> bytes: ...
    def pending(self) -> bytes | None:
        """A message that is here already."""
        ...

    async def close(self) -> None: ...


async def dial(url: str, *, subprotocol: str, headers: Mapping[str, str], connect_s: float, ping_s: float) -> Socket:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(connect_s):
            if parts.hostname not in _LOOPBACK and any(
                os.environ.get(n) or os.environ.get(n.upper()) for n in _PROXIES
            ):
                from rollyard.net.websocket_proxied import dial_through

                return await dial_through(url, subprotocol=subprotocol, headers=headers, ping_s=ping_s)
            secure = parts.scheme == "wss"
            port = parts.port or (443 if secure else 80)
            loop = asyncio.get_running_loop()
            _, socket = await loop.create_connection(
                lambda: PlainSocket(url, subprotocol, ping_s), parts.hostname or "", port, ssl=True if secure else None
            )
            try:
                await socket.shake_hands(headers)
            except BaseException:  # cancelled too: no one else holds this connection
                await socket.close()
                raise
            return socket
    except (OSError, TimeoutError, Lost) as error:
        raise EnvUnavailable(f"no environment can be reached at {url}: {type(error).__name__}") from error


def refuse(url: str, status: int) -> EnvError:
    if status in (401, 403):
        return EnvError(f"{url} refuses this key", hint="connect(url, key=...)")
    return EnvUnavailable(f"{url} answered {status}")


class PlainSocket(WebSocketConnection):
    def __init__(self, url: str, subprotocol: str, ping_s: float) -> None:
        self.subprotocol: str | None = None
        self._client = ClientProtocol(parse_uri(url), subprotocols=[Subprotocol(subprotocol)], max_size=LIMIT)
        super().__init__(self._client)
        self._url, self._ping_s = url, ping_s
        self._answer: Response | None = None
        self._lost: Callable[[], None] | None = None

    async def shake_hands(self, headers: Mapping[str, str]) -> None:
        if any("\r" in text or "\n" in text for pair in headers.items() for text in pair):
            raise EnvError("a header has a line break in it")
        request = self._client.connect()
        for name, value in headers.items():
            request.headers[name] = value
        self._client.send_request(request)
        self._flush()
        while self._answer is None:
            if self._gone or self._client.handshake_exc is not None:
                raise Lost("the server does not speak WebSocket")
            await self._wait()
        if self._answer.status_code != 101:
            raise refuse(self._url, self._answer.status_code)
        if self._client.handshake_exc is not None:
            raise Lost(f"the server's WebSocket handshake is wrong: {self._client.handshake_exc}")
        self.subprotocol = self._client.subprotocol
        self._pinging = asyncio.get_running_loop().call_later(self._ping_s, self._ping, self._ping_s, self._ping_s)

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        while self._messages:
            heard(self._messages.popleft())
        if self._gone:
            lost()

    async def recv(self) -> bytes:
        while not self._messages:
            if self._gone:
                raise Lost("the connection is closed")
            await self._wait()
        return self._messages.popleft()

    def pending(self) -> bytes | None:
        return self._messages.popleft() if self._messages else None

    async def close(self) -> None:
        self._lost = None
        self._hang_up(1000)

    def _opening(self, event: Any) -> None:
        self._answer = event
        self._wake()

    def _end(self) -> None:
        ended = self._gone
        super()._end()
        if not ended and self._lost is not None:
            self._lost()
