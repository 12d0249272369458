"""A WebSocket as the environments' client needs it: light to import, cheap per message, over plain asyncio.

Where a proxy is configured and the server is not on loopback, `client_proxied` takes its place: the `websockets` package knows
how to get through one. Extensions are not offered: a step is a small frame, and compressing it costs more than sending it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.net.websocket import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    Broken,
    Masks,
    WebSocketReader,
    accept_key,
    closing,
    frame,
)

LIMIT = 100 * 2**20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROXIES = ("all_proxy", "http_proxy", "https_proxy", "ws_proxy", "wss_proxy", "socks_proxy")
_HEAD = 64 * 1024


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
                lambda: PlainSocket(ping_s), parts.hostname or "", port, ssl=True if secure else None
            )
            try:
                await socket.shake_hands(url, subprotocol, headers)
            except BaseException:  # cancelled too: nobody else holds this connection
                await socket.close()
                raise
            return socket
    except (OSError, TimeoutError, Lost) as error:
        raise EnvUnavailable(f"no environment can be reached at {url}: {type(error).__name__}") from error


def refused(url: str, status: int) -> EnvError:
    if status in (401, 403):
        return EnvError(f"{url} refuses this key", hint="connect(url, key=...)")
    return EnvUnavailable(f"{url} answered {status}")


class PlainSocket(asyncio.Protocol):
    def __init__(self, ping_s: float) -> None:
        self.subprotocol: str | None = None
        self._ping_s = ping_s
        self._reader = WebSocketReader(masked=False, limit=LIMIT)
        self._masks = Masks()
        self._transport: asyncio.Transport | None = None
        self._head: bytes | None = b""  # what came of the answer to the handshake
        self._gone = False
        self._heard: Callable[[bytes], None] | None = None
        self._lost: Callable[[], None] | None = None
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self._pinging: asyncio.TimerHandle | None = None

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def eof_received(self) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            self._wake()
            return
        self._last = time.monotonic()
        try:
            for opcode, payload in self._reader.feed(data):
                if opcode in (TEXT, BINARY):
                    self._take(payload)
                elif opcode == PING:
                    self._write(frame(PONG, payload, self._masks.next()))
                elif opcode == CLOSE:
                    self._hang_up(payload)
                    return
        except Broken as error:
            self._hang_up(closing(error.code))

    # -- the client's side

    async def shake_hands(self, url: str, subprotocol: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        key = base64.b64encode(os.urandom(16))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {
            "Host": parts.netloc.rpartition("@")[2],
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": key.decode(),
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": subprotocol,
            **headers,
        }
        if any("\r" in text or "\n" in text for pair in lines.items() for text in pair):
            raise EnvError("a header has a line break in it")
        said = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._write(f"GET {target} HTTP/1.1\r\n{said}\r\n".encode())
        while self._head is not None and b"\r\n\r\n" not in self._head:
            if self._gone or len(self._head) > _HEAD:
                raise Lost("the server did not answer the handshake")
            await self._wait()
        self._answered(url, accept_key(key))

    def _answered(self, url: str, expected: bytes) -> None:
        assert self._head is not None
        head, _, rest = self._head.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ")
        if len(words) < 2 or not words[1].isdigit():
            raise Lost("the server does not speak HTTP")
        if int(words[1]) != 101:
            raise refused(url, int(words[1]))
        fields = {n.strip().lower(): v.strip() for n, _, v in (line.partition(b":") for line in lines[1:])}
        if fields.get(b"sec-websocket-accept") != expected:
            raise Lost("the server does not speak WebSocket")
        chosen = fields.get(b"sec-websocket-protocol")
        self.subprotocol = None if chosen is None else chosen.decode("latin-1")
        self._head = None
        self._last = time.monotonic()
        self._pinging = asyncio.get_running_loop().call_later(self._ping_s, self._ping)
        if rest:
            self.data_received(rest)

    def listen(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        while self._messages:
            heard(self._messages.popleft())
        if self._gone:
            lost()

    def send(self, text: bytes) -> None:
        self._write(frame(TEXT, text, self._masks.next()))

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
        self._hang_up(closing(1000) if self._head is None else None)

    # -- inside

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

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
        if not self._gone and self._transport is not None:
            self._transport.write(data)

    def _hang_up(self, payload: bytes | None) -> None:
        if payload is not None:
            self._write(frame(CLOSE, payload, self._masks.next()))
        self._end()

    def _end(self) -> None:
        if self._gone:
            return
        self._gone = True
        if self._pinging is not None:
            self._pinging.cancel()
        if self._transport is not None:
            self._transport.close()
        self._wake()
        if self._lost is not None:
            self._lost()

    def abort(self) -> None:
        """As a cut wire would: nothing is said to the other end."""
        if self._transport is not None:
            self._transport.abort()

    def _ping(self) -> None:
        """A server that said nothing for two intervals, and does not answer a ping, is gone."""
        idle = time.monotonic() - self._last
        if idle > 2 * self._ping_s:
            self.abort()
            self._end()
            return
        if idle >= self._ping_s / 2:
            self._write(frame(PING, b"", self._masks.next()))
        self._pinging = asyncio.get_running_loop().call_later(self._ping_s, self._ping)
