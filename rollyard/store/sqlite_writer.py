"""The connection that writes to a SQLite file: one transaction for all that waits.

The log is write-ahead with `synchronous=NORMAL`: a commit is in the kernel when it returns, so SIGKILL of any process loses
nothing and never corrupts; only a crash of the whole machine may lose the last transactions. `synchronous="full"` closes
that gap for one fsync per group. Readers never wait for the writer.

A new file is made with the first write, so that a caller who is refused before that leaves no empty store behind.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from rollyard.core.errors import Error, StoreError
from rollyard.store import sqlite_file
from rollyard.store.database import Work, prepare, run_works

Synchronous = Literal["normal", "full"]
T = TypeVar("T")

LONG_KB, LONG_PAUSE_S = 32_768, 0.05  # of a long transaction: pages in memory, and between two tries for the lock
LONG_STEPS = 100_000  # of SQLite's machine, between two looks at whether it was stopped: about a millisecond
CHECKPOINT_PAGES = 2000  # of the write-ahead log, until a transaction brings them into the file
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.001  # between two tries for the lock that another process has


class SQLiteWriter:
    """Of one thread: the one that calls `run` and `close`. `set_up` makes the tables of a file that is not there yet, and is
    None when that is done."""

    def __init__(
        self,
        path: Path,
        synchronous: Synchronous = "normal",
        set_up: Work[Any] | None = None,
        checkpoint_pages: int = CHECKPOINT_PAGES,
    ) -> None:
        self.set_up = set_up
        self._where, self._path = str(path), path.absolute()
        self._engine = create_engine("sqlite://", creator=sqlite_file.connect(path), poolclass=NullPool)
        event.listen(self._engine, "connect", _prepare_connection(synchronous, checkpoint_pages))
        self._connection: Connection | None = None
        self._file: tuple[int, int] | None = None  # which one is open

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        """A result for each; one that is an exception is to be raised for its caller. When one fails, each gets a transaction
        of its own, so that only the failing ones fail."""
        try:
            self._connection = connection = self._connection or self._open()
            self._check_file()
            prepare(works)
        except Exception as error:  # noqa: BLE001 - handed to every caller, and tried anew for the next
            return [self._explain(error) for _ in works]
        try:
            return _transaction(connection, works)
        except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to, here or below
            if len(works) == 1:
                return [self._explain(error)]
        results: list[Any] = []
        for work in works:
            try:
                results += _transaction(connection, [work])
            except Exception as error:  # noqa: BLE001 - handed to its caller, who raises it
                results.append(self._explain(error))
        return results

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()

    def _open(self) -> Connection:
        if self.set_up is not None:
            sqlite_file.make_file(self._path.resolve())
        connection = self._engine.connect()
        if self.set_up is not None:
            try:
                _transaction(connection, [self.set_up])
            except BaseException:  # whatever it was, the next write tries anew
                connection.close()
                raise
            self.set_up = None
        self._file = sqlite_file.identify(self._path)
        return connection

    def _check_file(self) -> None:
        """What is written to a file that has lost its name is gone with this process."""
        if sqlite_file.identify(self._path) != self._file:
            raise StoreError(
                f"the store {self._where} was removed or replaced while it was in use",
                hint="move it back under its name, or start again",
            )

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, Error):
            return error
        if isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError)):
            wrapped = sqlite_file.explain(error, self._where)
        else:
            wrapped = StoreError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped


class LongTransaction:
    """One transaction on a connection of its own, however long it takes, and however long other processes write before it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = False

    def run(self, work: Work[T]) -> T:
        connect = sqlite_file.connect(self._path, check_same_thread=False)
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
        event.listen(engine, "connect", _prepare_connection("normal", CHECKPOINT_PAGES))
        try:
            with engine.connect() as connection:
                driver = cast(sqlite3.Connection, connection.connection.driver_connection)
                driver.set_progress_handler(lambda: self._stopped, LONG_STEPS)
                driver.execute(f"PRAGMA cache_size=-{LONG_KB}")
                while not self._begins(driver):
                    time.sleep(LONG_PAUSE_S)
                return _finish(connection, [work])[0]
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise sqlite_file.explain(error, str(self._path)) from error
        finally:
            engine.dispose()

    def stop(self) -> None:
        """May be called from another thread; makes `run` raise."""
        self._stopped = True

    def _begins(self, driver: sqlite3.Connection) -> bool:
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or self._stopped:
                raise
            return False
        return True


def _transaction(connection: Connection, works: Sequence[Work[Any]]) -> list[Any]:
    driver: Any = connection.connection.driver_connection
    _execute_when_free(driver, "BEGIN IMMEDIATE")
    return _finish(connection, works)


def _finish(connection: Connection, works: Sequence[Work[Any]]) -> list[Any]:
    """Do the works of a transaction that has begun and commit it; all of it is kept or nothing."""
    driver: Any = connection.connection.driver_connection
    try:
        results = run_works(connection, works)
        connection.commit()
        if driver.in_transaction:
            driver.execute("COMMIT")
    except BaseException:  # whatever it was, nothing of the batch is kept; a full disk is met at the commit
        connection.rollback()
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise
    return results


def _execute_when_free(driver: sqlite3.Connection, statement: str) -> None:
    """SQLite's own waiting for the lock sleeps for up to 100 ms at a time, a hundred times as long as a transaction takes:
    processes that write to one file would wait for each other most of the time. For `journal_mode` it does not wait at all."""
    until, pause = time.monotonic() + sqlite_file.BUSY_MS / 1000, SHORTEST_PAUSE_S
    while True:
        try:
            driver.execute(statement).fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        else:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE_S)


def _prepare_connection(synchronous: Synchronous, checkpoint_pages: int) -> Callable[[Any, Any], None]:
    def set_pragmas(raw: Any, _: Any) -> None:
        raw.isolation_level = None  # transactions are begun by hand
        _execute_when_free(raw, "PRAGMA journal_mode=WAL")
        for pragma in (
            f"synchronous={synchronous.upper()}",
            f"busy_timeout={sqlite_file.BUSY_MS}",
            "cache_size=-2000",  # kilobytes: reading a page again costs less than pages that lie cold in memory
            f"wal_autocheckpoint={checkpoint_pages}",
            "busy_timeout=0",  # from here on `_execute_when_free` waits
        ):
            raw.execute(f"PRAGMA {pragma}").fetchall()

    return set_pragmas
