"""A transaction of minutes on a SQLite file: on a thread and a connection of its own, without a deadline.

It is the one that changes the tables of an older version. Other processes that open the file at that time wait for it, however
long it takes; one that is given up (Ctrl-C) stops at once, and the file is as it was.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import anyio
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from rollyard.core.log import Log
from rollyard.store import sqlite_file
from rollyard.store.database import Work

_PAUSE_S, _SILENT_S = 0.05, 1.0  # between two tries for another process's lock; until that is told
_STEPS = 100_000  # of SQLite's machine, between two looks at whether it is given up: about a millisecond
_log = Log("rollyard.store")


async def run_alone(path: Path, work: Work[Any]) -> None:
    given_up = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(_run, path, work, given_up))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        given_up.set()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # it ended at that moment, one way or the other
        raise


def _run(path: Path, work: Work[Any], given_up: threading.Event) -> None:
    connect = sqlite_file.connect(path, isolation_level=None)
    try:
        with create_engine("sqlite://", creator=connect, poolclass=NullPool).connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA busy_timeout=0").fetchall()
            if _begin(driver, path, given_up):
                driver.set_progress_handler(given_up.is_set, _STEPS)
                _finish(connection, driver, work)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise sqlite_file.explain(error, str(path)) from error


def _begin(driver: sqlite3.Connection, path: Path, given_up: threading.Event) -> bool:
    """Take the lock once no other process has it; False when that is given up."""
    pauses = 0
    while not given_up.is_set():
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        else:
            return True
        pauses += 1
        if pauses == _SILENT_S // _PAUSE_S:
            _log.warning("another process writes to %s or brings it up to date: waiting for it", path)
        given_up.wait(_PAUSE_S)
    return False


def _finish(connection: Connection, driver: sqlite3.Connection, work: Work[Any]) -> None:
    try:
        work(connection)
        connection.commit()
        if driver.in_transaction:
            driver.execute("COMMIT")
    except BaseException:  # whatever it was, nothing of it is kept; a full disk is met at the commit
        connection.rollback()
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise
