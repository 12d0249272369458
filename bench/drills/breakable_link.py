"""A connection between a program and its database that can be cut: bytes wait, and neither side learns that the other is gone."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from typing import Self


class BreakableLink:
    """`port` leads to `host:far`."""

    def __init__(self, host: str, far: int) -> None:
        self.host, self.far, self.port = host, far, 0
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, host: str, far: int) -> Self:
        link = cls(host, far)
        link._server = await asyncio.start_server(link._connect, host, 0)
        link.port = link._server.sockets[0].getsockname()[1]
        return link

    def cut(self) -> None:
        self._whole.clear()

    def restore(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection(self.host, self.far)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, far_writer))
                group.create_task(self._carry(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            writer.close()
        finally:
            self._tasks.discard(task)

    async def _carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        await self._whole.wait()
        writer.close()
