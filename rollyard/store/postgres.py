"""PostgreSQL through asyncpg: each write is a transaction of its own, in a pool; the server groups their commits.

A server that restarts, stands still or is out of disk for a while is waited for, within one deadline. A transaction whose
commit got no answer is never guessed about: each writes a token into a row that only it may use (a seat), and afterwards the row
says what became of it, so that no write is lost and none happens twice. The number of a transaction would not do: after a crash
the server hands out numbers again that it never wrote down.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from rollyard.core.errors import MissingExtra, StoreError, Unsupported
from rollyard.store.database import Put, Work
from rollyard.store.schema import seats

T = TypeVar("T")

DEADLINE_S = 60.0
CONNECT_S = 10.0
CONNECTIONS = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
REPEATABLE = ("40001", "40P01")  # serialization failure, deadlock
AWAY = ("08", "53", "57P")  # connection lost; no disk, memory or connections left; shut down, crashed or starting up
_CLOSE_S = 5.0
_put_seats = Put(seats, ("id", "token"), there="keep")


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
        self._name = secrets.token_hex(8)
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._free: list[str] = []
        self._seats: list[str] = []

    async def write(self, work: Work[T]) -> T:
        async with self._seat() as seat:
            return await _patiently(lambda: self._transaction(work, seat), "write")

    async def read(self, work: Work[T]) -> T:
        """All queries of one read see the same state."""
        return await _patiently(lambda: self._snapshot(work), "read")

    async def prepare(self, work: Work[T]) -> T:
        """A write before there are any tables, and so no seats; it must be one that may happen twice."""
        return await _patiently(lambda: self._begin(work), "write")

    async def _transaction(self, work: Work[T], seat: str) -> T:
        token, done = os.urandom(12), list[T]()

        def witnessed(connection: Connection) -> None:
            connection.execute(update(seats).where(seats.c.id == seat).values(token=token))
            done.append(work(connection))  # last: what it locks for others it holds only until the commit

        try:
            await self._begin(witnessed)
        except _Again:
            if done and await _patiently(lambda: self._begin(lambda c: _token(c, seat)), "answer") == token:
                return done[0]
            raise
        return done[0]

    async def _begin(self, work: Work[T]) -> T:
        try:
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)
        except (SQLAlchemyError, OSError) as error:
            raise _may_repeat(error) from error

    async def _snapshot(self, work: Work[T]) -> T:
        reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            async with reading.connect() as connection:
                return await connection.run_sync(work)
        except (SQLAlchemyError, OSError) as error:
            raise _may_repeat(error) from error

    @asynccontextmanager
    async def _seat(self) -> AsyncGenerator[str]:
        """A row that no other transaction uses meanwhile; it is there before the first one that does."""
        async with self._room:
            if not self._free:
                new = f"{self._name}/{len(self._seats)}"
                self._seats.append(new)
                await self.prepare(lambda connection: _put_seats.rows(connection, [(new, b"")]))
                self._free.append(new)
            seat = self._free.pop()
            try:
                yield seat
            finally:
                self._free.append(seat)

    async def backup(self, target: Path) -> None:
        raise Unsupported("backup copies a SQLite store", hint=f"use pg_dump --file {target} for this one")

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._begin(lambda c: c.execute(delete(seats).where(seats.c.id.in_(self._seats))))
        except (_Again, StoreError, TimeoutError):
            pass  # a few rows stay behind; they bother nobody
        await self._engine.dispose()


def _token(connection: Connection, seat: str) -> bytes | None:
    """What the seat's last transaction wrote; one that is still under way is waited for."""
    return connection.execute(select(seats.c.token).where(seats.c.id == seat).with_for_update()).scalar()


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
