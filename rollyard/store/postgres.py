"""PostgreSQL through asyncpg: each write is a transaction of its own, in a pool, or shares one (`shared_writes.py`).

A server that restarts, stands still or is out of disk for a while is waited for, within one deadline. One that was never reached
is given up sooner: the address is probably wrong. A transaction whose
commit got no answer is never guessed about: each writes a token into a row that only it may use (a seat), and afterwards the row
says what became of it, so that no write is lost and none happens twice. The number of a transaction would not do: after a crash
the server hands out numbers again that it never wrote down.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import anyio
from sqlalchemy import URL, Connection, delete, event, func, make_url, select, update
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from rollyard.core.errors import ConfigError, MissingExtra, StoreError, Unsupported
from rollyard.core.log import Log
from rollyard.store.database import Put, Work, run_works
from rollyard.store.schema import seats
from rollyard.store.shared_writes import SharedWrites

T = TypeVar("T")

DEADLINE_S = 60.0
CONNECT_S = 10.0
CONNECTIONS = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
REPEATABLE = ("40001", "40P01")  # serialization failure, deadlock
AWAY = (
    "08",  # connection lost
    "53",  # no disk, memory or connections left
    "57P",  # shut down, crashed or starting up
    "25P03",  # the transaction stood still for `IDLE_S`
)
IDLE_S = 30.0  # after which the server ends a transaction that stands still: others wait for what it locked
SHARED_WAIT_MS = 1000  # for a lock, in a transaction of several writes
_CLOSE_S = 5.0
_log = Log("rollyard.store")
_put_seats = Put(seats, ("id", "token"), there="keep")


class _MayRetry(Exception):
    """The transaction did not happen and may be tried once more."""


class _Unreached(_MayRetry):
    """There was no connection to the server at all."""


class PostgresDatabase:
    kind = "postgresql"

    def __init__(self, url: str, *, wait_s: float = 10.0) -> None:
        if find_spec("asyncpg") is None:
            raise MissingExtra("asyncpg", "postgres", why="a PostgreSQL store")
        address = _address(url)
        self.where = address.set(drivername="postgresql").render_as_string(hide_password=True)
        self._reached, self._wait_s = False, wait_s  # how long the first connection may take
        self._engine = create_async_engine(
            address,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=DEADLINE_S,
            connect_args={"timeout": CONNECT_S},
        )
        event.listen(self._engine.sync_engine, "connect", _bound_idle)
        self._name = secrets.token_hex(8)
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._free: list[str] = []
        self._seats: list[str] = []
        self._shared = SharedWrites(self._write_together, self._write_alone)

    async def write(self, work: Work[T]) -> T:
        if getattr(work, "shares", False):
            return await self._shared.write(work)
        return await self._write_alone(work)

    async def _write_alone(self, work: Work[T]) -> T:
        async with self._seat() as seat:
            return await self._retry(lambda: self._transaction(work, seat), "write")

    async def _write_together(self, works: Sequence[Work[Any]]) -> list[Any] | None:
        """None when one of them fails, or has to wait for a lock."""

        async def once(seat: str) -> list[Any] | None:
            try:
                return await self._transaction(
                    lambda connection: run_works(connection, works), seat, wait_ms=SHARED_WAIT_MS
                )
            except _MayRetry:
                raise
            except Exception:  # noqa: BLE001 - it comes again where each has a transaction of its own
                return None

        async with self._seat() as seat:
            return await self._retry(lambda: once(seat), "write")

    async def read(self, work: Work[T]) -> T:
        """All queries of one read see the same state."""
        return await self._retry(lambda: self._snapshot(work), "read")

    async def prepare(self, work: Work[Any]) -> None:
        """A write before there are any tables, and so no seats; it must be one that may happen twice."""
        await self._retry(lambda: self._begin(work), "write")

    async def _transaction(self, work: Work[T], seat: str, wait_ms: int | None = None) -> T:
        """With `wait_ms` the transaction fails when it has to wait so long for a lock."""
        token, done = os.urandom(12), list[T]()
        mark: Any = update(seats).where(seats.c.id == seat).values(token=token)
        if wait_ms is not None:
            mark = mark.returning(func.set_config("lock_timeout", str(wait_ms), True))

        def witnessed(connection: Connection) -> None:
            connection.execute(mark)
            done.append(work(connection))  # last: what it locks for others it holds only until the commit

        try:
            await self._begin(witnessed)
        except _MayRetry:
            if done and await self._retry(lambda: self._begin(lambda c: _token(c, seat)), "answer") == token:
                return done[0]
            raise
        return done[0]

    async def _begin(self, work: Work[T]) -> T:
        return await self._on(self._engine.begin, work)

    async def _snapshot(self, work: Work[T]) -> T:
        return await self._on(self._engine.execution_options(isolation_level="REPEATABLE READ").connect, work)

    async def _on(self, connect: Callable[[], AbstractAsyncContextManager[AsyncConnection]], work: Work[T]) -> T:
        async def run() -> T:
            async with connect() as connection:
                self._reached = True
                return await connection.run_sync(work)

        try:
            return await _cancel_once(asyncio.create_task(run()))
        except (SQLAlchemyError, OSError) as error:
            raise self._may_repeat(error) from error

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

    async def alter(self, work: Work[T]) -> T:
        try:
            return await self._begin(work)
        except _MayRetry as why:
            hint = "give the command again once the server answers: it begins anew"
            raise StoreError(f"the database {self.where} went away: {why}", hint=hint) from why

    async def backup(self, target: Path) -> None:
        raise Unsupported("backup copies a SQLite store", hint=f"use pg_dump --file {target} for this one")

    async def aclose(self) -> None:
        await self._shared.aclose()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._begin(lambda c: c.execute(delete(seats).where(seats.c.id.in_(self._seats))))
        except (_MayRetry, StoreError, TimeoutError):
            pass  # a few rows stay behind; they do no harm
        await self._engine.dispose()

    async def _retry(self, once: Callable[[], Awaitable[T]], what: str) -> T:
        """Try until it happened, it cannot, or the deadline has passed."""
        pause, why = FIRST_PAUSE_S, "no answer"
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    try:
                        return await once()
                    except _MayRetry as again:
                        why = str(again) or why
                        if isinstance(again, _Unreached) and not self._reached:
                            self._still_unreached(again, asyncio.get_running_loop().time() - started, pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except TimeoutError as error:
            raise StoreError(f"the database {self.where} gave no {what} for {DEADLINE_S:.0f} s: {why}") from error

    def _still_unreached(self, why: _Unreached, elapsed: float, pause: float) -> None:
        if elapsed + pause > self._wait_s:
            raise StoreError(
                f"no PostgreSQL server answers at {self.where}: {why}",
                hint="start the server, or correct the store's address",
            ) from why
        if pause == FIRST_PAUSE_S:
            _log.warning("%s does not answer (%s); trying for %.0f s", self.where, why, self._wait_s)

    def _may_repeat(self, error: Exception) -> Exception:
        """What to raise: `_MayRetry` for what passes by itself, else the error as one of ours."""
        if isinstance(error, OSError):  # the server does not listen, or a connection broke
            return _Unreached(str(error) or type(error).__name__)
        self._reached = True
        if isinstance(error, DBAPIError):
            state = getattr(error.orig, "sqlstate", None) or ""
            if error.connection_invalidated or state in REPEATABLE or state.startswith(AWAY):
                return _MayRetry(f"{type(error.orig).__name__}: {error.orig}")
            return StoreError(f"the database {self.where} refused: {error.orig}")
        return StoreError(f"the database {self.where} refused: {error}")


async def _cancel_once(task: asyncio.Task[T]) -> T:
    """A cancel scope goes on cancelling whatever its task waits for, also SQLAlchemy while it closes the connection, which then
    shows a trace. In a task of its own a transaction is cancelled once, and waited for."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((task,), timeout=_CLOSE_S)
        if task.done() and not task.cancelled():
            task.exception()  # it ended at that moment, one way or the other: its result is not needed
        raise


def _bound_idle(raw: Any, _: Any) -> None:
    """A process that is frozen in the middle of a transaction must not keep everybody else waiting."""
    cursor = raw.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = {IDLE_S * 1000:.0f}")
    cursor.close()
    raw.commit()


def _token(connection: Connection, seat: str) -> bytes | None:
    """What the seat's last transaction wrote; one that is still under way is waited for."""
    return connection.execute(select(seats.c.token).where(seats.c.id == seat).with_for_update()).scalar()


def _address(url: str) -> URL:
    try:
        address = make_url(url).set(drivername="postgresql+asyncpg")
    except (ArgumentError, ValueError) as error:
        raise ConfigError(
            "the store's PostgreSQL address cannot be read", hint="postgresql://USER:PASSWORD@HOST:PORT/NAME"
        ) from error
    if address.port is not None and not 0 < address.port < 65536:
        raise ConfigError(f"the store's PostgreSQL address has port {address.port}", hint="ports are 1 to 65535")
    return address
