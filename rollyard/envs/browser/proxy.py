"""The only way out of a browser's sandbox: an HTTP proxy on the host's side that knows a few origins.

The browser has no network. It is configured to send everything here, through a listener in its sandbox; an origin that its
lease's holder never named is refused, whatever a page or an agent types. Plain requests are carried one to a connection;
TLS and WebSockets are tunnelled.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import ByteStream, Listener

_HEAD = 64 * 1024
_CONNECT_S = 10.0
_PIECE = 64 * 1024
_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> tuple[str, int]:
    """(host, port) of an http or https URL."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"{url!r} is not a page's address", hint="give an http:// or https:// URL")
    return parts.hostname, port or _PORTS[parts.scheme]


class OriginProxy:
    """Serves `listener` until it is closed. `allow` may grow while it runs."""

    def __init__(self, listener: Listener) -> None:
        self.port = listener.port
        self.allowed: set[tuple[str, int]] = set()
        self.refused = 0
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep(self._accept())

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.aclose()

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # pyright: ignore[reportArgumentType] - any coroutine
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            self._keep(self._serve(await self._listener.accept()))

    async def _serve(self, browser: ByteStream) -> None:
        try:
            head, rest = await _head(browser)
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
            origin = origin_of(f"https://{target}" if method == "CONNECT" else target)
            if origin not in self.allowed:
                self.refused += 1
                await _answer(browser, 403, f"{origin[0]}:{origin[1]} is not part of this task")
                return
            await self._carry(browser, origin, method, target, head, rest)
        except (ConfigError, ValueError):
            await _answer(browser, 400, "not a proxy request")
        except (OSError, TimeoutError):
            await _answer(browser, 502, "the application does not answer")
        finally:
            await browser.aclose()

    async def _carry(
        self, browser: ByteStream, origin: tuple[str, int], method: str, target: str, head: bytes, rest: bytes
    ) -> None:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(*origin)
        try:
            if method == "CONNECT":
                await browser.send(b"HTTP/1.1 200 OK\r\n\r\n")
                writer.write(rest)
            else:
                writer.write(_rewritten(method, target, head) + rest)
            upward = asyncio.create_task(_up(browser, writer))
            try:
                while piece := await reader.read(_PIECE):
                    await browser.send(piece)
                await browser.send_eof()
            finally:
                upward.cancel()
                await asyncio.gather(upward, return_exceptions=True)
        finally:
            writer.close()


async def _up(browser: ByteStream, writer: asyncio.StreamWriter) -> None:
    while piece := await browser.receive(_PIECE):
        writer.write(piece)
        await writer.drain()


async def _head(stream: ByteStream) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await stream.receive(_PIECE)
        data += piece
        if not piece or len(data) > _HEAD:
            raise ValueError("no request")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _rewritten(method: str, target: str, head: bytes) -> bytes:
    """In the form a server expects, and for this one request."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        line
        for line in head.split(b"\r\n")[1:]
        if not line.lower().startswith((b"connection:", b"proxy-", b"keep-alive:"))
    ]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode("latin-1"), *lines, b"Connection: close", b"", b""])


async def _answer(stream: ByteStream, status: int, text: str) -> None:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} -\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        await stream.send(head.encode() + body)
    except OSError:
        pass  # the browser left before the refusal was sent
