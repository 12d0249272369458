"""The process that writes to a SQLite file for several: what they sent while one transaction ran is the next one.

It has no lock to wait for: the program's other processes only read. A client is answered when its works are committed; works of
one that has left are committed all the same. Pages go from the log into the file on a thread of their own, since that waits
for the disk: half of the time at full load. A transaction does it only where the log has become very long.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from rollyard.store import sqlite_file
from rollyard.store.database import Work
from rollyard.store.migrate import bring_up_to_date
from rollyard.store.sqlite_writer import SQLiteWriter
from rollyard.store.store import Store
from rollyard.store.writer_link import LABEL, Frames, frame

GROUP = 1024  # works in one transaction, and those that came with the last of them
LONGEST_LOG = 32_768  # pages, 128 MiB
CHECKPOINT_S = 0.2
STOP_S = 30.0  # for the last clients to leave


async def serve_writes(path: Path, inbox: socket.socket, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until `stop` is set and no client is left."""
    async with Store.open(path):
        pass  # one that is too old is brought up to date, and what is no store is refused
    set_up = None if path.exists() else partial(bring_up_to_date, where=str(path))
    writer = SQLiteWriter(path, set_up=set_up, checkpoint_pages=LONGEST_LOG)
    service = WritingService(writer, Checkpoints(path))
    loop = asyncio.get_running_loop()
    loop.add_reader(inbox.fileno(), service.accept, inbox)
    try:
        ready()
        await stop.wait()
        await service.wait_for_clients()
    finally:
        loop.remove_reader(inbox.fileno())
        service.close()


class WritingService:
    def __init__(self, writer: SQLiteWriter, checkpoints: Checkpoints) -> None:
        self._writer, self._checkpoints = writer, checkpoints
        self._clients: set[Frames] = set()
        self._alone = asyncio.Event()
        self._alone.set()
        self._waiting: list[tuple[_Client, list[Work[Any]]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def accept(self, inbox: socket.socket) -> None:
        """All that wait in the inbox."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(inbox, len(LABEL), 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            for descriptor in descriptors:
                client = _Client(self)
                self._clients.add(client)
                self._alone.clear()
                opening = loop.create_task(_adopt(client, descriptor))
                self._tasks.add(opening)
                opening.add_done_callback(self._tasks.discard)

    def take(self, client: _Client, works: list[Work[Any]]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write)
        self._waiting.append((client, works))

    def leave(self, client: Frames) -> None:
        self._clients.discard(client)
        if not self._clients:
            self._alone.set()

    async def wait_for_clients(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._alone.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        self._write()
        self._checkpoints.close()
        self._writer.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        together: list[Work[Any]] = []
        first = 0
        for last, (_, works) in enumerate(waiting, 1):
            together += works
            if len(together) >= GROUP or last == len(waiting):
                results = self._writer.run(together)
                for client, own in waiting[first:last]:
                    client.answer(results[: len(own)])
                    del results[: len(own)]
                together, first = [], last
        self._checkpoints.owed.set()


class Checkpoints:
    """Brings what is in the log into the file, every `CHECKPOINT_S` while something is written. A transaction that finds the log
    in the file altogether begins it anew."""

    def __init__(self, path: Path) -> None:
        self.owed = threading.Event()
        self._over = threading.Event()
        self._connect = sqlite_file.connect(path, isolation_level=None)
        self._thread = threading.Thread(target=self._run, name="rollyard-checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self.owed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(CHECKPOINT_S):
            self.owed.wait()
            self.owed.clear()
            with suppress(sqlite3.Error), closing(self._connect()) as raw:
                # The writer does it in the end, and says what fails
                raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


class _Client(Frames):
    def __init__(self, service: WritingService) -> None:
        super().__init__(partial(service.take, self), service.leave)
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def answer(self, results: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(results))


async def _adopt(client: _Client, descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: client, sock)
    except OSError:  # it has left already
        sock.close()
        client.connection_lost(None)
