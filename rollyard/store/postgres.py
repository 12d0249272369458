"""PostgreSQL through asyncpg: each write is a transaction of its own, in a pool; the server groups their commits."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from rollyard.core.errors import MissingExtra, StoreError, Unsupported
from rollyard.store.database import Work

T = TypeVar("T")

DEADLINE_S = 60.0
CONNECTIONS = 16
TRIES = 5
REPEATABLE = ("40001", "40P01")  # serialization failure, deadlock


class Postgres:
    kind = "postgresql"

    def __init__(self, url: str) -> None:
        if find_spec("asyncpg") is None:
            raise MissingExtra("asyncpg", "postgres", why="a PostgreSQL store")
        rest = url.split("://", 1)[1]
        self._engine = create_async_engine(f"postgresql+asyncpg://{rest}", pool_size=CONNECTIONS, max_overflow=0)

    async def write(self, work: Work[T]) -> T:
        async with asyncio.timeout(DEADLINE_S):
            for left in reversed(range(TRIES)):
                try:
                    async with self._engine.begin() as connection:
                        return await connection.run_sync(work)
                except DBAPIError as error:
                    if not left or getattr(error.orig, "sqlstate", None) not in REPEATABLE:
                        raise StoreError(f"database error: {error.orig}") from error
                except SQLAlchemyError as error:
                    raise StoreError(f"database error: {error}") from error
        raise AssertionError("every try returns or raises")

    async def read(self, work: Work[T]) -> T:
        """All queries of one read see the same state."""
        reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        async with asyncio.timeout(DEADLINE_S), reading.connect() as connection:
            return await connection.run_sync(work)

    async def backup(self, target: Path) -> None:
        raise Unsupported("backup copies a SQLite store", hint=f"use pg_dump --file {target} for this one")

    async def aclose(self) -> None:
        await self._engine.dispose()
