"""A whole store into an empty one of another kind: SQLite to PostgreSQL or back, every row under the id that it has.

Rows go in the order of their keys, some megabytes to a transaction. Indexes, triggers and the words for searching are dropped
from the empty target first and made again when all rows are in, out of the statements that made them: kept up row by row they
cost more than the rows. Until then the target's version is that of an unfinished copy (`migrate.UNFINISHED`), so nothing else
opens it, and the same copy begun again goes on after the rows that are there.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from functools import cache, partial
from typing import Any

import msgspec
from sqlalchemy import Connection, LargeBinary, Table, Text, func, select, text, tuple_

from rollyard.core.errors import ConfigError, StoreError
from rollyard.store.database import Database, Put
from rollyard.store.migrate import UNFINISHED, current, prepare
from rollyard.store.schema import HEAD, WORDS, metadata, seats
from rollyard.store.store import Store, open_database

Key = tuple[Any, ...]

_BYTES = 4 << 20  # of rows, after which a transaction takes no more
_READ = 100  # rows that are fetched at once: some hold whole conversations
_TABLES = [table for table in metadata.sorted_tables if table is not seats]  # seats are those of open connections
_LATER = {  # what is dropped and made again: its kind, its name, and its statement
    "sqlite": "SELECT type, name, sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND sql IS NOT NULL",
    "postgresql": "SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() "
    "AND NOT EXISTS (SELECT FROM pg_constraint WHERE conname = indexname)",
}
_AFTER = {"sqlite": f"INSERT INTO {WORDS}({WORDS}) VALUES ('rebuild')", "postgresql": "ANALYZE"}  # noqa: S608


async def copy_store(source: str, target: str, *, at_once: int = 5000) -> dict[str, int]:
    """How many rows each table of the target then has; a transaction takes no more than `at_once`. Nothing may write to the
    source meanwhile. The target is new, has nothing in it, or is what a copy of the same source that was broken off left."""
    async with Store.open(source, create=False) as store:
        old = store.database
        counts = await _count_all(old)
        new = open_database(target, "normal", private=True)
        try:
            await _begin(new, await _mark(old, counts))
            for table in _TABLES:
                await _copy(old, new, table, at_once)
            if await _count_all(new) != counts:
                raise StoreError(f"the rows in {new.where} are not those of {old.where}", hint="copy into a new store")
            await _finish(new)
        finally:
            await new.aclose()
    return counts


async def _begin(new: Database, mark: str) -> None:
    version = await new.read(current)
    if version == mark:
        return
    if version is not None and version.startswith(UNFINISHED):
        raise ConfigError(
            f"{new.where} is an unfinished copy of another store, or of this one before it was changed",
            hint="copy into a new store",
        )
    await prepare(new, create=True)
    if full := [name for name, count in (await _count_all(new)).items() if count]:
        raise ConfigError(f"{new.where} is not empty: {', '.join(full[:5])}", hint="give a new store")
    await new.write(partial(_strip, mark=mark))


def _strip(connection: Connection, mark: str) -> None:
    """Only tables stay, with their keys. What is to be made again is kept in the target itself, for a copy that goes on."""
    kind = connection.dialect.name
    later = connection.execute(text(_LATER[kind])).all()
    connection.execute(text("CREATE TABLE copying (number INTEGER PRIMARY KEY, statement TEXT NOT NULL)"))
    for number, statement in enumerate([*(sql for *_, sql in later), _AFTER[kind]]):
        connection.execute(text("INSERT INTO copying VALUES (:n, :statement)"), {"n": number, "statement": statement})
    for type, name, _ in later:
        connection.execute(text(f'DROP {type} "{name}"'))
    connection.execute(text("UPDATE alembic_version SET version_num = :mark"), {"mark": mark})


def _make_again(connection: Connection, number: int, statement: str) -> None:
    connection.exec_driver_sql(statement)
    connection.execute(text("DELETE FROM copying WHERE number = :n"), {"n": number})


async def _copy(old: Database, new: Database, table: Table, at_once: int) -> None:
    there = await new.read(partial(_count, table=table))
    last = await old.read(partial(_key_of, table=table, number=there - 1)) if there else None
    while rows := await old.read(partial(_read, table=table, after=last, at_once=at_once)):
        await new.write(partial(_put, table=table, rows=rows))
        key = dict(zip(table.columns.keys(), rows[-1], strict=True))
        last = tuple(key[column.name] for column in table.primary_key)


def _read(connection: Connection, table: Table, after: Key | None, at_once: int) -> list[tuple[Any, ...]]:
    key = tuple(table.primary_key)
    query = select(table).order_by(*key).limit(at_once)
    if after is not None:
        query = query.where(tuple_(*key) > tuple_(*after))
    large = [number for number, column in enumerate(table.columns) if isinstance(column.type, LargeBinary | Text)]
    rows, size = list[tuple[Any, ...]](), 0
    with closing(connection.execute(query.execution_options(yield_per=_READ))) as found:
        for row in found:
            rows.append(tuple(row))
            size += sum(len(row[number] or "") for number in large)
            if size >= _BYTES:
                break
    return rows


def _put(connection: Connection, table: Table, rows: list[tuple[Any, ...]]) -> None:
    if connection.dialect.name == "sqlite":
        _insert(table).rows(connection, rows)
        return

    async def send(driver: Any) -> None:
        await driver.copy_records_to_table(table.name, records=rows, columns=[column.name for column in table.columns])

    link: Any = connection.connection.dbapi_connection
    link.run_async(send)


@cache
def _insert(table: Table) -> Put:
    return Put(table, tuple(column.name for column in table.columns), there="fail")


async def _finish(new: Database) -> None:
    while waiting := await new.read(lambda c: c.execute(text("SELECT * FROM copying ORDER BY number LIMIT 1")).first()):
        await new.alter(partial(_make_again, number=waiting.number, statement=waiting.statement))
    await new.write(_open_for_use)


def _open_for_use(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        for table in _TABLES:
            _go_on(connection, table)
    connection.execute(text("DROP TABLE copying"))
    connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})


def _go_on(connection: Connection, table: Table) -> None:
    """Numbers that PostgreSQL gives out itself begin after those that were copied."""
    for column in table.primary_key:
        name = connection.execute(select(func.pg_get_serial_sequence(table.name, column.name))).scalar()
        if name is not None:
            last = select(func.coalesce(func.max(column), 0) + 1).scalar_subquery()
            connection.execute(select(func.setval(text(f"'{name}'"), last, False)))


async def _mark(old: Database, counts: dict[str, int]) -> str:
    """The version of an unfinished copy of what the source holds now."""
    digest = hashlib.sha256(msgspec.json.encode(counts))
    for table in _TABLES:
        if counts[table.name]:
            last = await old.read(partial(_key_of, table=table, number=counts[table.name] - 1))
            digest.update(repr(last).encode())
    return UNFINISHED + digest.hexdigest()[:16]


def _key_of(connection: Connection, table: Table, number: int) -> Key:
    """Of the row with that number in the order of the source: another database may sort names otherwise."""
    key = tuple(table.primary_key)
    return tuple(connection.execute(select(*key).order_by(*key).limit(1).offset(number)).one())


async def _count_all(database: Database) -> dict[str, int]:
    return {table.name: await database.read(partial(_count, table=table)) for table in _TABLES}


def _count(connection: Connection, table: Table) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()
