"""SQLite with group commit: one thread owns the writing connection and puts everything that waits into one transaction.

The log is write-ahead with `synchronous=NORMAL`: a commit is in the kernel when it returns, so SIGKILL of any process loses
nothing and never corrupts; only a crash of the whole machine may lose the last transactions. `synchronous="full"` closes
that gap for one fsync per group. Readers never wait for the writer.

The thread is the point: a checkpoint or a slow disk must not stop the event loop. Works are handed to it in batches: those
of one turn of the loop when little happens, those of `GATHER_S` or of their own `gather_s` when much does, since a transaction
of one costs more than twice as much per call as one of sixteen.

A new file is made with the first write, so that a caller who is refused before that leaves no empty store behind. Whatever goes
wrong on the thread, opening included, is handed to the callers whose works it concerns.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from rollyard.core.errors import Error, StoreError
from rollyard.store import sqlite_file
from rollyard.store.database import Work

T = TypeVar("T")
Synchronous = Literal["normal", "full"]

DEADLINE_S = 60.0
BACKUP_S = 3600.0
READERS = 4
GROUP = 512  # the most functions in one transaction
GATHER_S = 0.008  # under load: a few milliseconds of waiting for half the cost
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.001  # between two tries for the lock that another process has
BUSY_S = 0.02  # batches that follow each other faster than this are load


class _Waiting(NamedTuple):
    work: Work[Any]
    future: asyncio.Future[Any]


class _Batch:
    """What one loop hands in together; its one timer is the deadline of all in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.works: list[_Waiting] = []
        self.timer: asyncio.TimerHandle | None = None
        self.due = math.inf  # when it is handed in, by the loop's clock


class SQLite:
    kind = "sqlite"

    def __init__(self, path: Path, *, synchronous: Synchronous = "normal") -> None:
        self._waiting: SimpleQueue[_Batch | None] = SimpleQueue()
        self._gathering: dict[asyncio.AbstractEventLoop, _Batch] = {}
        self._handed_at = 0.0
        self.where = str(path)
        self._path = path.absolute()
        self._set_up: Work[Any] | None = None  # what makes the tables of a file that is not there yet
        self._engine = create_engine("sqlite://", creator=sqlite_file.connect(path), poolclass=NullPool)
        event.listen(self._engine, "connect", _writer_set_up(synchronous))
        self._reading = create_engine(
            "sqlite://",
            creator=sqlite_file.connect(path, check_same_thread=False),
            poolclass=QueuePool,
            pool_size=READERS,
            max_overflow=0,
        )
        event.listen(self._reading, "connect", _reader_set_up)
        event.listen(self._reading, "begin", _one_snapshot)
        self._thread = threading.Thread(target=self._run, name="rollyard-store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        batch = self._gathering.get(loop)
        if batch is None:
            batch = self._gathering[loop] = _Batch(loop)
        now = loop.time()
        due = now + max(GATHER_S, getattr(work, "gather_s", 0.0)) if now - self._handed_at < BUSY_S else now
        if due < batch.due:
            batch.due = due
            loop.call_at(due, self._hand_in, batch)
        batch.works.append(_Waiting(work, future))
        return await future

    async def prepare(self, work: Work[Any]) -> None:
        if self._set_up is None and not self._path.exists():
            self._set_up = work
        else:
            await self.write(work)

    def _hand_in(self, batch: _Batch) -> None:
        if self._gathering.get(batch.loop) is batch:
            del self._gathering[batch.loop]
            self._handed_at = batch.loop.time()
            batch.timer = batch.loop.call_later(DEADLINE_S, _expire, batch)
            self._waiting.put(batch)

    async def read(self, work: Work[T]) -> T:
        """On a thread of the loop's pool: an async driver would be a thread too, and twenty megabytes of import."""
        if self._set_up is not None and self._path.exists():  # another process made the file meanwhile
            await self.write(lambda _: None)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.to_thread(self._read, work)
        except TimeoutError as error:
            raise StoreError(f"the store {self.where} gave no answer for {DEADLINE_S:.0f} s") from error

    def _read(self, work: Work[T]) -> T:
        try:
            set_up = self._set_up
            if set_up is not None or not self._path.exists():
                return _read_nothing(set_up, work)
            with self._reading.connect() as connection:
                return work(connection)
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise sqlite_file.explain(error, self.where) from error

    async def backup(self, target: Path) -> None:
        """A copy taken from one snapshot, complete and compact; it is itself a store."""
        sqlite_file.check_place(self._path, create=False)
        async with asyncio.timeout(BACKUP_S):
            await asyncio.to_thread(sqlite_file.copy, self._path, target)

    async def aclose(self) -> None:
        """Everything handed in is written first."""
        for batch in list(self._gathering.values()):
            self._hand_in(batch)
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, DEADLINE_S)
        self._reading.dispose()

    # the writing thread

    def _run(self) -> None:
        connection: Connection | None = None
        last = False
        while not last:
            batches, last = self._next()
            works = [waiting.work for batch in batches for waiting in batch.works]
            if not works:
                continue
            try:
                connection = connection or self._open()
                _prepare(works)
                results = _together(connection, works, self.where)
            except Exception as error:  # noqa: BLE001 - handed to every caller: this thread outlives it
                results = [_of_ours(error, self.where) for _ in works]
            _hand_back(batches, results)
        if connection is not None:
            connection.close()
        self._engine.dispose()

    def _next(self) -> tuple[list[_Batch], bool]:
        """What waits, and whether it is the last."""
        first = self._waiting.get()
        batches: list[_Batch] = []
        while first is not None:
            batches.append(first)
            if sum(len(batch.works) for batch in batches) >= GROUP:
                break
            try:
                first = self._waiting.get_nowait()
            except Empty:
                break
        return batches, first is None

    def _open(self) -> Connection:
        if self._set_up is not None:
            sqlite_file.make_file(self._path.resolve())
        connection = self._engine.connect()
        if self._set_up is not None:
            try:
                _transaction(connection, [self._set_up])
            except BaseException:  # whatever it was, the next write tries anew
                connection.close()
                raise
            self._set_up = None
        return connection


def _read_nothing(set_up: Work[Any] | None, work: Work[T]) -> T:
    """What a store without a row answers, before its file is made: the file is there a moment before its tables are."""
    with create_engine("sqlite://", poolclass=NullPool).connect() as connection:
        if set_up is not None:
            set_up(connection)
        return work(connection)


def _prepare(works: list[Work[Any]]) -> None:
    """What needs no lock on the file is done before there is one."""
    for work in works:
        if (prepare := getattr(work, "prepare", None)) is not None:
            with suppress(Exception):  # it comes again in the transaction, and goes to its caller
                prepare()


def _together(connection: Connection, works: list[Work[Any]], where: str) -> list[Any]:
    """One transaction for all; when one fails, each gets its own, so that only the failing ones fail. A result that is an
    exception is to be raised."""
    try:
        return _transaction(connection, works)
    except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to, here or below
        if len(works) == 1:
            return [_of_ours(error, where)]
    results: list[Any] = []
    for work in works:
        try:
            results += _transaction(connection, [work])
        except Exception as error:  # noqa: BLE001 - handed to its caller, who raises it
            results.append(_of_ours(error, where))
    return results


def _transaction(connection: Connection, works: list[Work[Any]]) -> list[Any]:
    driver: Any = connection.connection.driver_connection
    _begin(driver)
    try:
        results = _run_works(connection, works)
    except BaseException:  # whatever it was, nothing of the batch is kept
        connection.rollback()
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise
    connection.commit()
    if driver.in_transaction:
        driver.execute("COMMIT")
    return results


def _begin(driver: sqlite3.Connection) -> None:
    """SQLite's own waiting for the lock sleeps for up to 100 ms at a time, a hundred times as long as a transaction takes:
    processes that write to one file would wait for each other most of the time."""
    until, pause = time.monotonic() + sqlite_file.BUSY_MS / 1000, SHORTEST_PAUSE_S
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        else:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE_S)


def _run_works(connection: Connection, works: list[Work[Any]]) -> list[Any]:
    """In order; neighbours that know how are done `together`."""
    results: list[Any] = []
    for together, group in groupby(works, key=lambda work: getattr(work, "together", None)):
        alike = list(group)
        results += [work(connection) for work in alike] if together is None else together(connection, alike)
    return results


def _of_ours(error: Exception, where: str) -> Exception:
    if isinstance(error, Error):
        return error
    if isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError)):
        wrapped = sqlite_file.explain(error, where)
    else:
        wrapped = StoreError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _hand_back(batches: list[_Batch], results: list[Any]) -> None:
    start = 0
    for batch in batches:
        own = results[start : start + len(batch.works)]
        start += len(batch.works)
        try:
            batch.loop.call_soon_threadsafe(_resolve, batch, own)
        except RuntimeError:
            continue  # that loop is closed: nobody waits there any more


def _resolve(batch: _Batch, results: list[Any]) -> None:
    if batch.timer is not None:
        batch.timer.cancel()
    for waiting, result in zip(batch.works, results, strict=True):
        future = waiting.future
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _expire(batch: _Batch) -> None:
    late = StoreError(f"the database took no write for {DEADLINE_S:.0f} s", hint="is its disk full?")
    for waiting in batch.works:
        if not waiting.future.done():
            waiting.future.set_exception(late)


def _writer_set_up(synchronous: Synchronous) -> Callable[[Any, Any], None]:
    def prepare(raw: Any, _: Any) -> None:
        raw.isolation_level = None  # transactions are begun by hand
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous.upper()}",
            f"busy_timeout={sqlite_file.BUSY_MS}",
            "cache_size=-16000",
            "wal_autocheckpoint=2000",
            "busy_timeout=0",  # from here on `_begin` waits
        ):
            raw.execute(f"PRAGMA {pragma}").fetchall()

    return prepare


def _reader_set_up(raw: Any, _: Any) -> None:
    raw.isolation_level = None
    cursor = raw.cursor()
    for pragma in (f"busy_timeout={sqlite_file.BUSY_MS}", "query_only=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _one_snapshot(connection: Connection) -> None:
    """All queries of one read see the same state; the driver alone begins no transaction for them."""
    connection.exec_driver_sql("BEGIN")
