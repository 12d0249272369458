"""PostgreSQL through asyncpg: each write is a transaction of its own, in a pool; the server groups their commits.

A server that restarts, stands still or is out of disk for a while is waited for, within one deadline. A transaction whose
commit got no answer is never guessed about: its number was asked for before, and the server says what became of it, so that
no write is lost and none happens twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from rollyard.core.errors import MissingExtra, StoreError, Unsupported
from rollyard.store.database import Work

T = TypeVar("T")

DEADLINE_S = 60.0
CONNECT_S = 10.0
CONNECTIONS = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
REPEATABLE = ("40001", "40P01")  # serialization failure, deadlock
AWAY = ("08", "53", "57P")  # connection lost; no disk, memory or connections left; shut down, crashed or starting up


class _Again(Exception):
    """The transaction did not happen and may be tried once more."""


class Postgres:
    kind = "postgresql"

    def __init__(self, url: str) -> None:
        if find_spec("asyncpg") is None:
            raise MissingExtra("asyncpg", "postgres", why="a PostgreSQL store")
        rest = url.split("://", 1)[1]
        self._engine = create_async_engine(
            f"postgresql+asyncpg://{rest}",
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=DEADLINE_S,
            connect_args={"timeout": CONNECT_S},
        )

    async def write(self, work: Work[T]) -> T:
        return await _patiently(lambda: self._transaction(work), "write")

    async def read(self, work: Work[T]) -> T:
        """All queries of one read see the same state."""
        return await _patiently(lambda: self._snapshot(work), "read")

    async def _transaction(self, work: Work[T]) -> T:
        done: list[tuple[T, str]] = []  # the result, and the number of the transaction that made it

        def numbered(connection: Connection) -> None:
            result = work(connection)
            done.append((result, connection.exec_driver_sql("SELECT pg_current_xact_id()::text").scalar_one()))

        try:
            async with self._engine.begin() as connection:
                await connection.run_sync(numbered)
        except (SQLAlchemyError, OSError) as error:
            again = _may_repeat(error)
            if done and isinstance(again, _Again):
                result, number = done[0]
                if await _patiently(lambda: self._has_committed(number), "answer"):
                    return result
            raise again from error
        return done[0][0]

    async def _has_committed(self, number: str) -> bool:
        query = f"SELECT pg_xact_status('{int(number)}'::xid8)"
        status = await self._snapshot(lambda connection: connection.exec_driver_sql(query).scalar())
        if status == "in progress":  # the server has not noticed yet that its client is gone
            raise _Again
        return status == "committed"

    async def _snapshot(self, work: Work[T]) -> T:
        reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            async with reading.connect() as connection:
                return await connection.run_sync(work)
        except (SQLAlchemyError, OSError) as error:
            raise _may_repeat(error) from error

    async def backup(self, target: Path) -> None:
        raise Unsupported("backup copies a SQLite store", hint=f"use pg_dump --file {target} for this one")

    async def aclose(self) -> None:
        await self._engine.dispose()


async def _patiently(once: Callable[[], Awaitable[T]], what: str) -> T:
    """Try until it happened, it cannot, or the deadline has passed."""
    pause, why = FIRST_PAUSE_S, "no answer"
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    return await once()
                except _Again as again:
                    why = str(again) or why
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
    except TimeoutError as error:
        raise StoreError(f"the database gave no {what} for {DEADLINE_S:.0f} s: {why}") from error


def _may_repeat(error: Exception) -> Exception:
    """What to raise: `_Again` for what passes by itself, else the error as one of ours."""
    if isinstance(error, OSError):  # the server does not listen, or a connection broke
        return _Again(str(error) or type(error).__name__)
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None) or ""
        if error.connection_invalidated or state in REPEATABLE or state.startswith(AWAY):
            return _Again(f"{type(error.orig).__name__}: {error.orig}")
        return StoreError(f"database error: {error.orig}")
    return StoreError(f"database error: {error}")
