"""Methods that are one transaction or one consistent read: `get_run = reads(runs.get)`.

The work is a function of a connection, written once beside its tables; the method has its parameters, its result and its
docstring, for type checkers and editors too. Work that needs the time takes it right after the connection, so that callers
cannot give it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from rollyard.store.database import Database, SmallOperation, StoreOperation

P = ParamSpec("P")
T = TypeVar("T")


class Records:
    """Records in one database. `clock` decides about leases; without one this machine's does, and on PostgreSQL the
    server's."""

    def __init__(self, database: Database, clock: Callable[[], float] | None = None) -> None:
        self.database = database
        self.clock = clock or time.time
        self._own_clock = clock is not None or database.kind == "sqlite"

    def lease_time(self) -> float | None:
        """The time that decides about leases; None leaves it to the database's server."""
        return self.clock() if self._own_clock else None


def reads(
    work: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[Records, P], CoroutineType[Any, Any, T]]:
    """A method that runs `work` on a snapshot."""

    @wraps(work)
    async def method(records: Records, /, *args: P.args, **options: P.kwargs) -> T:
        return await records.database.read(lambda connection: work(connection, *args, **options))

    return method


def writes(
    work: Callable[Concatenate[Connection, P], T], *, small: bool = False
) -> Callable[Concatenate[Records, P], CoroutineType[Any, Any, T]]:
    """A method that runs `work` in a transaction and returns once that would survive SIGKILL. With `small` others may share
    it."""
    operation = SmallOperation if small else StoreOperation

    @wraps(work)
    async def method(records: Records, /, *args: P.args, **options: P.kwargs) -> T:
        return await records.database.write(operation(work, *args, **options))

    return method


def writes_at(
    work: Callable[Concatenate[Connection, float, P], T], *, small: bool = False
) -> Callable[Concatenate[Records, P], CoroutineType[Any, Any, T]]:
    """As `writes`, for work that notes when it was done."""
    operation = SmallOperation if small else StoreOperation

    @wraps(work)
    async def method(records: Records, /, *args: P.args, **options: P.kwargs) -> T:
        at = records.clock()
        return await records.database.write(operation(work, at, *args, **options))

    return method


def writes_lease(
    work: Callable[Concatenate[Connection, float | None, P], T], *, small: bool = False
) -> Callable[Concatenate[Records, P], CoroutineType[Any, Any, T]]:
    """As `writes`, for work that needs the time by which leases run out."""
    operation = SmallOperation if small else StoreOperation

    @wraps(work)
    async def method(records: Records, /, *args: P.args, **options: P.kwargs) -> T:
        now = records.lease_time()
        return await records.database.write(operation(work, now, *args, **options))

    return method
