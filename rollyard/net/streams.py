"""A byte stream as a transport: how a `HttpConnection` is served where a backend has no socket to listen on."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rollyard.core.protocols import ByteStream
from rollyard.net.http_server import HttpConnection

_HIGH = 256 * 1024


class StreamTransport:
    """The part of `asyncio.Transport` that a `HttpConnection` uses."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._reading = asyncio.Event()
        self._reading.set()
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None:
        if self._closing or not data:
            return
        self._queue.append(data)
        self._size += len(data)
        if self._size > _HIGH and not self._connection.paused:
            self._connection.pause_writing()
        self._wake.set()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading.clear()

    def resume_reading(self) -> None:
        self._reading.set()

    async def read(self, stream: ByteStream) -> None:
        """Hand on what comes, until the other side is done."""
        while data := await stream.receive():
            self._connection.data_received(data)
            await self._reading.wait()

    def close(self) -> None:
        self._closing = True
        self._wake.set()

    def abort(self) -> None:
        self._closing = True
        self.aborted.set()
        self._wake.set()

    async def pump(self, stream: ByteStream) -> None:
        """Send what was written, in order, until closed."""
        while True:
            while self._queue:
                data = self._queue.popleft()
                self._size -= len(data)
                await stream.send(data)
                if self._connection.paused and self._size < _HIGH // 4:
                    self._connection.resume_writing()
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()


async def serve_stream(stream: ByteStream, connection: HttpConnection) -> None:
    """Returns when either side is done; the stream is closed then."""
    transport: Any = StreamTransport(connection)
    connection.connection_made(transport)
    work = (transport.read(stream), transport.pump(stream), transport.aborted.wait())
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connection.connection_lost(None)
        await stream.aclose()
