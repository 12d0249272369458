"""A database as the store uses it: functions of a connection, run in a transaction or on a snapshot.

Every operation of the store is a plain function `f(connection, ...)`, written once in SQLAlchemy Core. `SQLite` runs the
writing ones on its own thread, many to a transaction; `Postgres` gives those that have `shares` one transaction when they come
at the same time, and each other one its own. A function may run again when its transaction had to be repeated, so it does
nothing but talk to the connection. One that has an attribute `together` may be run as `together(connection, works)` with others
of its kind; that gives a result for each, and one that is an exception is raised for its caller. One that has `took_s`, the
time that its caller has spent already, may be kept for a small share of that, while much is written, until others have come. One
that has `prepare` may be asked to do so before its transaction, while other processes write. Where another process writes, works
are pickled; one that has `repeat` may be sent again as what that gives, when it is not known whether it was done, and one that is
`large` is prepared on a thread, since an event loop would stand still meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import sqlite

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[Connection], T]


class StoreOperation(Generic[T]):
    """A work: a function of a module with all its arguments but the connection. It can be pickled where they can."""

    __slots__ = ("_args", "_function", "_options")

    def __init__(
        self, function: Callable[Concatenate[Connection, P], T], /, *args: P.args, **options: P.kwargs
    ) -> None:
        self._function: Callable[..., T] = function
        self._args, self._options = args, options

    def __call__(self, connection: Connection) -> T:
        return self._function(connection, *self._args, **self._options)


class SmallOperation(StoreOperation[T]):
    """One of a few rows that only one worker writes: its transaction may be shared."""

    __slots__ = ()
    shares = True


def prepare(works: Iterable[Work[Any]]) -> None:
    """Do what needs no lock on the database before there is one."""
    for work in works:
        if (own := getattr(work, "prepare", None)) is not None:
            with suppress(Exception):  # it comes again in the transaction, and goes to its caller
                own()


def run_works(connection: Connection, works: Sequence[Work[Any]]) -> list[Any]:
    """Run the works in order; neighbours that can are done `together`."""
    results: list[Any] = []
    for together, group in groupby(works, key=lambda work: getattr(work, "together", None)):
        alike = list(group)
        results += [work(connection) for work in alike] if together is None else together(connection, alike)
    return results


class Database(Protocol):
    kind: str
    where: str  # as messages name it: without a password

    def write(self, work: Work[T]) -> Coroutine[Any, Any, T]:
        """Run in a transaction; returns once that would survive SIGKILL of this process."""
        ...

    async def prepare(self, work: Work[Any]) -> None:
        """A write that may find no tables at all; it must be one that may happen twice, and may wait for the first write."""
        ...

    async def read(self, work: Work[T]) -> T: ...
    async def alter(self, work: Work[T]) -> T:
        """One transaction without a deadline, for what takes as long as there are rows: an index, a migration."""
        ...

    async def backup(self, target: Path) -> None: ...
    async def aclose(self) -> None: ...


class Put:
    """An insert of whole rows, as tuples in the order of `columns`, with what to do about one that is there already.

    On SQLite the statement is compiled once and goes straight to the driver: an insert through the expression language
    costs several times as much as the insert itself. PostgreSQL's is made on first use: its dialect takes two megabytes.
    """

    def __init__(self, table: Table, columns: tuple[str, ...], *, there: Literal["fail", "keep", "replace"]) -> None:
        self._table, self._columns, self._there = table, columns, there
        compiled = self._insert(sqlite.insert).compile(
            dialect=sqlite.dialect(paramstyle="qmark"), column_keys=list(columns)
        )
        assert compiled.positiontup is not None
        self._sql = str(compiled)
        self._order = [columns.index(name) for name in compiled.positiontup]
        if self._order == list(range(len(columns))):
            self._order = []

    def _insert(self, insert: Callable[[Table], Any]) -> Any:
        statement = insert(self._table)
        if self._there == "keep":
            return statement.on_conflict_do_nothing()
        if self._there == "replace":
            keys = [column.name for column in self._table.primary_key]
            rest = {name: statement.excluded[name] for name in self._columns if name not in keys}
            return statement.on_conflict_do_update(index_elements=keys, set_=rest)
        return statement

    @cached_property
    def _statement(self) -> Any:
        from sqlalchemy.dialects import postgresql

        return self._insert(postgresql.insert)

    def rows(self, connection: Connection, rows: list[tuple[Any, ...]]) -> None:
        if not rows:
            return
        if connection.dialect.name != "sqlite":
            connection.execute(self._statement, [dict(zip(self._columns, row, strict=True)) for row in rows])
            return
        if self._order:
            rows = [tuple(row[index] for index in self._order) for row in rows]
        driver: Any = connection.connection.driver_connection
        driver.executemany(self._sql, rows)
