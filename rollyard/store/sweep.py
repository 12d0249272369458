"""Bodies that nothing refers to any more go: first every reference is read, then what none names is removed.

References are read a few thousand at a time and kept in a temporary database on disk, so neither memory nor a transaction grows
with the store. Between two transactions another process may begin to write, and what it writes may name a body that was found
unused. So each removal first proves, in its own transaction, that nothing was added since the reading began.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import closing
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Table, delete, func, select, text, tuple_

from rollyard.core.delta import Delta
from rollyard.core.errors import StoreError
from rollyard.store.call_rows import find_bases
from rollyard.store.database import Database, StoreOperation
from rollyard.store.schema import artifacts, attempts, blobs, calls, events, rollouts, sessions, verdicts

AT_ONCE = 20_000  # bodies that one transaction removes
_READ = 5000  # rows that one read takes
_READ_DIFFERENCES = 1000  # and of these, which are longer
_CACHE_KB = 32_768
_delta = msgspec.msgpack.Decoder(Delta)


class _Named(msgspec.Struct):
    """The bodies that a call's record names."""

    raw_request: bytes = b""
    raw_response: bytes = b""
    tools_digest: bytes = b""


_named = msgspec.msgpack.Decoder(_Named)


async def sweep(database: Database, now: float) -> int:
    """Remove bodies that nothing refers to; gives how many. Refused while leases or sessions are open, since a body may be kept
    a moment before what refers to it; broken off when something is written meanwhile, and then it may be repeated."""
    before = await database.read(lambda connection: _measure(connection, now))
    with closing(_Used()) as used:
        async for digests in _references(database):
            await asyncio.to_thread(used.add, digests)
        await _follow_differences(database, used)
        if not await _is_some_unused(database, used):
            return 0
        async for digests in _bases_of_calls(database):
            await asyncio.to_thread(used.add, digests)
        await asyncio.to_thread(used.add_what_they_build_on)
        gone = 0
        async for unused in _find_unused(database, used):
            gone += await database.write(StoreOperation(_remove, unused, before, now))
    return gone


class _Used:
    """Digests of bodies that are in use, in a database of its own that ends with it."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for line in (
            f"PRAGMA cache_size=-{_CACHE_KB}",
            "PRAGMA journal_mode=OFF",
            "CREATE TABLE used (digest BLOB PRIMARY KEY) WITHOUT ROWID",
            "CREATE TABLE bases (digest BLOB PRIMARY KEY, base BLOB NOT NULL) WITHOUT ROWID",
        ):
            self._database.execute(line)

    def add(self, digests: Iterable[bytes]) -> None:
        self._insert("INSERT OR IGNORE INTO used VALUES (?)", [(digest,) for digest in sorted(set(digests))])

    def add_bases(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._insert("INSERT OR IGNORE INTO bases VALUES (?, ?)", pairs)

    def add_what_they_build_on(self) -> None:
        self._database.execute(
            "INSERT OR IGNORE INTO used WITH RECURSIVE more(digest) AS ("
            "SELECT base FROM bases JOIN used USING (digest) UNION SELECT base FROM bases JOIN more USING (digest)"
            ") SELECT digest FROM more"
        )

    def find_unused(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those that are not in use. One by one: between two of them may lie a million that are."""
        ask = "SELECT 1 FROM used WHERE digest = ?"
        return [digest for digest in digests if self._database.execute(ask, (digest,)).fetchone() is None]

    def close(self) -> None:
        self._database.close()

    def _insert(self, statement: str, rows: Sequence[tuple[bytes, ...]]) -> None:
        self._database.execute("BEGIN")
        self._database.executemany(statement, rows)
        self._database.execute("COMMIT")


async def _references(database: Database) -> AsyncGenerator[list[bytes]]:
    """Every digest that a row names, in lists of a few thousand."""
    for table, column in ((artifacts, artifacts.c.digest), (rollouts, rollouts.c.task)):
        async for rows in _stream(database, table, column):
            yield [bytes(digest) for digest in rows]
    gathered: list[bytes] = []
    async for rows in _stream(database, calls, calls.c.record):
        for packed in rows:
            one = _named.decode(packed)
            gathered += (one.raw_request, one.raw_response, one.tools_digest)
        if len(gathered) > 20 * _READ:  # in order, many at once go into few pages
            yield gathered
            gathered = []
    yield gathered


async def _bases_of_calls(database: Database) -> AsyncGenerator[list[bytes]]:
    """What calls' own bodies are differences from. The record of an earlier call names nearly each of these as well, and calls'
    bodies are most of a store: they are read only where something is to be removed."""
    async for rows in _stream(database, calls, calls.c.bodies):
        yield [base for packed in rows if packed is not None for base in find_bases(packed)]


async def _stream(database: Database, table: Table, column: Column[Any]) -> AsyncGenerator[list[Any]]:
    """A column of a whole table, in the order of its key."""
    key, last = tuple(table.primary_key), None
    while True:
        query = select(column, *key).order_by(*key).limit(_READ)
        if last is not None:
            query = query.where(tuple_(*key) > tuple_(*last))
        rows = await database.read(lambda connection, asked=query: connection.execute(asked).all())
        yield [row[0] for row in rows]
        if len(rows) < _READ:
            return
        last = tuple(rows[-1][1:])


async def _follow_differences(database: Database, used: _Used) -> None:
    """What is kept as a difference needs the body that it is a difference from."""
    last = b""
    while True:
        query = select(blobs.c.digest, blobs.c.data).where(blobs.c.encoding == "delta", blobs.c.digest > last)
        query = query.order_by(blobs.c.digest).limit(_READ_DIFFERENCES)
        rows = await database.read(lambda connection, asked=query: connection.execute(asked).all())
        await asyncio.to_thread(used.add_bases, [(bytes(digest), _delta.decode(data).base) for digest, data in rows])
        if len(rows) < _READ_DIFFERENCES:
            break
        last = rows[-1][0]
    await asyncio.to_thread(used.add_what_they_build_on)


async def _find_unused(database: Database, used: _Used) -> AsyncGenerator[list[bytes]]:
    unused: list[bytes] = []
    async for found in _stream(database, blobs, blobs.c.digest):
        unused += await asyncio.to_thread(used.find_unused, [bytes(digest) for digest in found])
        while len(unused) >= AT_ONCE:
            yield unused[:AT_ONCE]
            unused = unused[AT_ONCE:]
    if unused:
        yield unused


async def _is_some_unused(database: Database, used: _Used) -> bool:
    async for _ in _find_unused(database, used):
        return True
    return False


def _remove(connection: Connection, unused: Sequence[bytes], before: tuple[Any, ...], now: float) -> int:
    if connection.dialect.name == "postgresql":  # SQLite has one writer at a time in any case
        connection.execute(text("LOCK TABLE calls, rollouts, artifacts, blobs IN SHARE ROW EXCLUSIVE MODE"))
    if _measure(connection, now) != before:
        raise StoreError("something was written meanwhile", hint="sweep when nothing runs")
    for start in range(0, len(unused), 500):
        connection.execute(delete(blobs).where(blobs.c.digest.in_(unused[start : start + 500])))
    return len(unused)


def _measure(connection: Connection, now: float) -> tuple[Any, ...]:
    """How much there is of all that refers to bodies, or comes with it."""
    leased = (attempts.c.state == "leased") & (attempts.c.expires_at > now)
    busy = connection.execute(select(func.count()).where(leased)).scalar_one()
    busy += connection.execute(select(func.count()).where(sessions.c.closed_at.is_(None))).scalar_one()
    if busy:
        raise StoreError(f"{busy} leases or sessions are open", hint="sweep when nothing runs")
    counted = [func.count(one.c.rollout_id) for one in (sessions, calls, artifacts)] + [func.count(rollouts.c.id)]
    newest = [func.max(column) for column in (events.c.seq, verdicts.c.id)]
    return tuple(connection.execute(select(one)).scalar() for one in (*counted, *newest))
