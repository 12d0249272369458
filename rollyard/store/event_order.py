"""Following events by number on PostgreSQL, where they commit in another order than they are numbered.

Numbers come from a sequence. A reader that has seen a later one would never go back for an earlier one that commits after it.
So readers wait, rather than writers for each other. A writer that draws a number locks the sequence first, along with all
others that do, until its transaction ends. Of the numbers up to the newest that a snapshot shows, those that are still to come
therefore belong to transactions that `pg_locks` names after it. Once each of these has ended, all numbers up to there are
settled: a later snapshot shows them, or they were rolled back and never come.

Nothing but an append takes that lock, so other transactions on the server, however long, delay no reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection, text

from rollyard.core.errors import StoreError
from rollyard.store.database import Database
from rollyard.store.events import latest
from rollyard.store.values import StoredEvent

_PAUSE_S = 0.005  # an append lasts about as long
_FEW_S = 0.25  # how long one look waits for appends under way
_MANY_S = 45.0  # longer than the server lets a transaction stand still
_APPENDING = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted "
    "AND relation = CAST(pg_get_serial_sequence('events', 'seq') AS regclass) "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class EventOrder:
    """Up to which number the events of a database are settled, as far as this process has seen."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.settled = 0

    async def follow(self, find: Callable[..., list[StoredEvent]], after: int) -> list[StoredEvent]:
        """What `find` finds of settled events past a number."""
        before, found = self.settled, list[StoredEvent]()
        if after < before:
            found = await self._database.read(partial(find, after=after, until=before))
        if not found and await self._advance(_FEW_S) and self.settled > max(after, before):
            found = await self._database.read(partial(find, after=after, until=self.settled))
        return found

    async def _advance(self, wait_s: float) -> bool:
        """Settle what is there now; False when an append is still under way after that time."""
        newest, under_way = await self._database.read(lambda connection: _look(connection, self.settled))
        until = asyncio.get_running_loop().time() + wait_s
        while under_way:
            if asyncio.get_running_loop().time() > until:
                return False
            await asyncio.sleep(_PAUSE_S)
            under_way &= await self._database.read(_find_appends)
        self.settled = max(self.settled, newest)
        return True

    async def latest(self) -> int:
        """The newest number before which none is still to come."""
        if not await self._advance(_MANY_S):
            raise StoreError(
                f"an append of events to {self._database.where} has been under way for {_MANY_S:.0f} s",
                hint="end the transaction: pg_locks names those that hold events_seq_seq",
            )
        return self.settled


def _look(connection: Connection, settled: int) -> tuple[int, set[str]]:
    """In this order: what the snapshot shows, then the appends that may still put something before it."""
    newest = latest(connection)
    return newest, _find_appends(connection) if newest > settled else set()


def _find_appends(connection: Connection) -> set[str]:
    return set(connection.execute(_APPENDING).scalars())
