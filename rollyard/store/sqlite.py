"""SQLite with group commit: one thread owns the writing connection and puts everything that waits into one transaction.

The log is write-ahead with `synchronous=NORMAL`: a commit is in the kernel when it returns, so SIGKILL of any process loses
nothing and never corrupts; only a crash of the whole machine may lose the last transactions. `synchronous="full"` closes
that gap for one fsync per group. Readers never wait for the writer.

The thread is the point: a checkpoint or a slow disk must not stop the event loop, and while one transaction is being
written the next group gathers.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from rollyard.core.errors import ConfigError, Error, StoreError
from rollyard.store.database import Work

T = TypeVar("T")
Synchronous = Literal["normal", "full"]

DEADLINE_S = 60.0
BACKUP_S = 3600.0
BUSY_MS = 30_000  # how long another process may hold the write lock
GROUP = 512  # the most functions in one transaction


class _Waiting(NamedTuple):
    work: Work[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class SQLite:
    kind = "sqlite"

    def __init__(self, path: Path, *, synchronous: Synchronous = "normal") -> None:
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
        event.listen(self._engine, "connect", _writer_set_up(synchronous))
        self._reading = create_async_engine(f"sqlite+aiosqlite:///{path}", pool_size=4, max_overflow=0)
        event.listen(self._reading.sync_engine, "connect", _reader_set_up)
        self._thread = threading.Thread(target=self._run, name="rollyard-store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.put(_Waiting(work, loop, future))
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await future
        except TimeoutError:
            raise StoreError(f"the database took no write for {DEADLINE_S:.0f} s", hint="is its disk full?") from None

    async def read(self, work: Work[T]) -> T:
        async with asyncio.timeout(DEADLINE_S), self._reading.connect() as connection:
            return await connection.run_sync(work)

    async def backup(self, target: Path) -> None:
        """A copy taken from one snapshot, complete and compact; it is itself a store."""
        if target.exists():
            raise ConfigError(f"{target} exists", hint="choose a new file")
        async with asyncio.timeout(BACKUP_S), self._reading.connect() as connection:
            await connection.execute(text("PRAGMA query_only=OFF"))
            try:
                await connection.execute(text("VACUUM INTO :target"), {"target": str(target)})
            finally:
                await connection.execute(text("PRAGMA query_only=ON"))

    async def aclose(self) -> None:
        """Everything handed in is written first."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, DEADLINE_S)
        await self._reading.dispose()

    # the writing thread

    def _run(self) -> None:
        with self._engine.connect() as connection:
            last = False
            while not last:
                first = self._waiting.get()
                group: list[_Waiting] = []
                while first is not None:
                    group.append(first)
                    if len(group) == GROUP:
                        break
                    try:
                        first = self._waiting.get_nowait()
                    except Empty:
                        break
                last = first is None
                if group:
                    _hand_back(group, _together(connection, [waiting.work for waiting in group]))
        self._engine.dispose()


def restore(backup: Path, target: Path) -> None:
    """Put a backup in the place of a store that is not there (any more), after checking that it is whole."""
    if target.exists():
        raise ConfigError(f"{target} exists", hint="move it away first, with its -wal and -shm files")
    engine = create_engine(f"sqlite:///{backup}", poolclass=NullPool)
    try:
        with engine.connect() as connection:
            found = connection.execute(text("PRAGMA integrity_check")).scalar()
    except SQLAlchemyError as error:
        raise StoreError(f"{backup} is not a store: {error}") from error
    if found != "ok":
        raise StoreError(f"{backup} is damaged: {found}")
    shutil.copyfile(backup, target)


def _together(connection: Connection, works: list[Work[Any]]) -> list[Any]:
    """One transaction for all; when one fails, each gets its own, so that only the failing ones fail. A result that is an
    exception is to be raised."""
    try:
        return _transaction(connection, works)
    except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to, here or below
        if len(works) == 1:
            return [_of_ours(error)]
    results: list[Any] = []
    for work in works:
        try:
            results += _transaction(connection, [work])
        except Exception as error:  # noqa: BLE001 - handed to its caller, who raises it
            results.append(_of_ours(error))
    return results


def _transaction(connection: Connection, works: list[Work[Any]]) -> list[Any]:
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN IMMEDIATE")
    try:
        results = [work(connection) for work in works]
    except BaseException:
        connection.rollback()
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise
    connection.commit()
    if driver.in_transaction:
        driver.execute("COMMIT")
    return results


def _of_ours(error: Exception) -> Exception:
    if isinstance(error, Error):
        return error
    kind = "database" if isinstance(error, SQLAlchemyError) else type(error).__name__
    wrapped = StoreError(f"{kind} error: {error}")
    wrapped.__cause__ = error
    return wrapped


def _hand_back(group: list[_Waiting], results: list[Any]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for waiting, result in zip(group, results, strict=True):
        by_loop.setdefault(waiting.loop, []).append((waiting.future, result))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, pairs)
        except RuntimeError:
            continue  # that loop is closed: nobody waits there any more


def _resolve(pairs: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in pairs:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _writer_set_up(synchronous: Synchronous) -> Callable[[Any, Any], None]:
    def prepare(raw: Any, _: Any) -> None:
        raw.isolation_level = None  # transactions are begun by hand
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={synchronous.upper()}",
            f"busy_timeout={BUSY_MS}",
            "cache_size=-16000",
            "wal_autocheckpoint=2000",
        ):
            raw.execute(f"PRAGMA {pragma}").fetchall()

    return prepare


def _reader_set_up(raw: Any, _: Any) -> None:
    cursor = raw.cursor()
    for pragma in (f"busy_timeout={BUSY_MS}", "query_only=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
