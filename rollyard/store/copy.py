"""A whole store into an empty one of another kind: SQLite to PostgreSQL or back, every row under the id that it has."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, func, insert, select, text, tuple_

from rollyard.core.errors import ConfigError
from rollyard.store.schema import metadata, seats
from rollyard.store.store import Store

_ROWS = 200  # at once: some of them hold whole conversations


async def copy_store(source: str, target: str) -> dict[str, int]:
    """How many rows of each table were copied. Nobody may write to the source meanwhile; the target is new or has nothing in
    it, and after a copy that was broken off it has to be made anew."""
    tables = [table for table in metadata.sorted_tables if table is not seats]  # seats are those of open connections
    async with Store.open(source, create=False) as old, Store.open(target, private=True) as new:
        full = [table.name for table in tables if await new.database.read(lambda c, t=table: _count(c, t))]
        if full:
            raise ConfigError(f"{new.database.where} is not empty: {', '.join(full[:5])}", hint="give a new store")
        counts = {table.name: await _copy(old, new, table) for table in tables}
        if new.database.kind != "sqlite":
            await new.database.write(lambda c: [_go_on(c, table) for table in tables])
    return counts


async def _copy(old: Store, new: Store, table: Table) -> int:
    copied, last = 0, None
    while rows := await old.database.read(lambda c, after=last: _page(c, table, after)):
        await new.database.write(lambda c, these=rows: c.execute(insert(table), these))
        copied, last = copied + len(rows), tuple(rows[-1][column.name] for column in table.primary_key)
    return copied


def _page(connection: Connection, table: Table, after: tuple[Any, ...] | None) -> list[dict[str, Any]]:
    key = tuple(table.primary_key)
    query = select(table).order_by(*key).limit(_ROWS)
    if after is not None:
        query = query.where(tuple_(*key) > tuple_(*after))
    return [dict(row) for row in connection.execute(query).mappings()]


def _count(connection: Connection, table: Table) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()


def _go_on(connection: Connection, table: Table) -> None:
    """Numbers that PostgreSQL gives out itself begin after those that were copied."""
    for column in table.primary_key:
        name = connection.execute(select(func.pg_get_serial_sequence(table.name, column.name))).scalar()
        if name is not None:
            last = select(func.coalesce(func.max(column), 0) + 1).scalar_subquery()
            connection.execute(select(func.setval(text(f"'{name}'"), last, False)))
