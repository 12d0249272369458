"""SQLite with group commit: one thread, or one process of several, writes everything that waits in one transaction.

A thread or a process is the point: a checkpoint or a slow disk must not stop the event loop. Where one process uses the store,
it is a thread of it (`ThreadWriter`); several processes of one program send their works to one of them (`writer_link.py`), since
SQLite lets one write at a time and the others would wait for its lock. Whatever goes wrong there, opening included, is
handed to the callers whose works it concerns.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
from collections.abc import Coroutine
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from rollyard.core.errors import StoreError
from rollyard.store import sqlite_file
from rollyard.store.batches import DEADLINE_S, Batch, Batches
from rollyard.store.database import Work
from rollyard.store.sqlite_writer import LongTransaction, SQLiteWriter, Synchronous
from rollyard.store.writer_link import WriterLink

T = TypeVar("T")

BACKUP_S = 3600.0
READERS = 4
GROUP = 512  # the most functions in one transaction


class BatchWriter(Protocol):
    """What writes batches. `set_up` makes the tables of a file that is not there yet; None once it is."""

    set_up: Work[Any] | None

    def take(self, batch: Batch) -> None: ...
    async def aclose(self) -> None:
        """Everything it took is written first."""
        ...


class SQLite:
    """`writer` leads to the process that writes for several; without it a thread here does."""

    kind = "sqlite"

    def __init__(self, path: Path, *, synchronous: Synchronous = "normal", writer: socket.socket | None = None) -> None:
        self.where = str(path)
        self.path = path.absolute()
        self._writer: BatchWriter = (
            ThreadWriter(path, synchronous) if writer is None else WriterLink(writer, self.where)
        )
        self._batches = Batches(self._writer.take)
        self._reading = create_engine(
            "sqlite://",
            creator=sqlite_file.connect(path, check_same_thread=False),
            poolclass=QueuePool,
            pool_size=READERS,
            max_overflow=0,
        )
        event.listen(self._reading, "connect", _reader_set_up)
        event.listen(self._reading, "begin", _one_snapshot)

    def write(self, work: Work[T]) -> Coroutine[Any, Any, T]:
        return self._batches.write(work)

    async def prepare(self, work: Work[Any]) -> None:
        if self._writer.set_up is None and not self.path.exists():
            self._writer.set_up = work
        else:
            await self.write(work)

    async def read(self, work: Work[T]) -> T:
        """On a thread of the loop's pool: an async driver would be a thread too, and twenty megabytes of import."""
        if self._writer.set_up is not None and self.path.exists():  # another process made the file meanwhile
            await self.write(_write_nothing)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.to_thread(self._read, work)
        except TimeoutError as error:
            raise StoreError(f"the store {self.where} gave no answer for {DEADLINE_S:.0f} s") from error

    def _read(self, work: Work[T]) -> T:
        try:
            set_up = self._writer.set_up
            if set_up is not None or not self.path.exists():
                return _read_nothing(set_up, work)
            with self._reading.connect() as connection:
                return work(connection)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if not self.path.exists():  # any more
                raise sqlite_file.missing_error(self.where) from error
            raise sqlite_file.explain(error, self.where) from error

    async def alter(self, work: Work[T]) -> T:
        transaction = LongTransaction(self.path)
        try:
            return await asyncio.to_thread(transaction.run, work)
        except asyncio.CancelledError:
            transaction.stop()  # the loop waits for its threads before it ends
            raise

    async def backup(self, target: Path) -> None:
        """A copy taken from one snapshot, complete and compact; it is itself a store."""
        sqlite_file.check_place(self.path, create=False)
        async with asyncio.timeout(BACKUP_S):
            await asyncio.to_thread(sqlite_file.copy, self.path, target)

    async def aclose(self) -> None:
        """Everything handed in is written first."""
        self._batches.flush()
        await self._writer.aclose()
        self._reading.dispose()


class ThreadWriter(SQLiteWriter):
    """A thread of this process writes."""

    def __init__(self, path: Path, synchronous: Synchronous) -> None:
        super().__init__(path, synchronous)
        self._waiting: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollyard-store", daemon=True)
        self._thread.start()

    def take(self, batch: Batch) -> None:
        self._waiting.put(batch)

    async def aclose(self) -> None:
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, DEADLINE_S)

    def _run(self) -> None:
        last = False
        while not last:
            batches, last = self._next()
            works = [waiting.work for batch in batches for waiting in batch.works]
            if works:
                _hand_back(batches, self.run(works))
        self.close()

    def _next(self) -> tuple[list[Batch], bool]:
        """The batches that wait, and whether they are the last."""
        first = self._waiting.get()
        batches: list[Batch] = []
        while first is not None:
            batches.append(first)
            if sum(len(batch.works) for batch in batches) >= GROUP:
                break
            try:
                first = self._waiting.get_nowait()
            except Empty:
                break
        return batches, first is None


def _hand_back(batches: list[Batch], results: list[Any]) -> None:
    start = 0
    for batch in batches:
        own = results[start : start + len(batch.works)]
        start += len(batch.works)
        try:
            batch.loop.call_soon_threadsafe(batch.resolve, own)
        except RuntimeError:
            continue  # that loop is closed: nothing waits there any more


def _write_nothing(_: Connection) -> None:
    """Once this is done there are tables."""


def _read_nothing(set_up: Work[Any] | None, work: Work[T]) -> T:
    """What a store without a row answers, before its file is made: the file is there a moment before its tables are."""
    with create_engine("sqlite://", poolclass=NullPool).connect() as connection:
        if set_up is not None:
            set_up(connection)
        return work(connection)


def _reader_set_up(raw: Any, _: Any) -> None:
    raw.isolation_level = None
    cursor = raw.cursor()
    for pragma in (f"busy_timeout={sqlite_file.BUSY_MS}", "query_only=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _one_snapshot(connection: Connection) -> None:
    """All queries of one read see the same state; the driver alone begins no transaction for them."""
    connection.exec_driver_sql("BEGIN")
