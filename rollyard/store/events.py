"""Events: appended as they happen, read by number.

On SQLite numbers are in the order of commits. On PostgreSQL they are not: readers that go on from a number are given those that
are settled (`event_order.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select

from rollyard.core.events import Event
from rollyard.core.lease import Lease
from rollyard.store import leases
from rollyard.store.schema import events
from rollyard.store.values import StoredEvent


def append(connection: Connection, new: list[Event]) -> None:
    rows = [
        {
            "rollout_id": event.rollout_id,
            "run_id": event.run_id,
            "at": event.at,
            "name": event.name,
            "fields": msgspec.json.encode(event.fields).decode(),
        }
        for event in new
    ]
    connection.execute(insert(events), rows)


def append_held(connection: Connection, events: Sequence[tuple[Lease, Event]]) -> None:
    """Those of claims that are still good; events of the others come from their new owners."""
    good = leases.still_held(connection, [lease for lease, _ in events])
    new = [event for lease, event in events if (lease.attempt.id, lease.fence) in good]
    if new:
        append(connection, new)


def latest(connection: Connection) -> int:
    """The number of the newest event; 0 when there is none."""
    return connection.execute(select(func.coalesce(func.max(events.c.seq), 0))).scalar_one()


def list_between(
    connection: Connection,
    *,
    after: int,
    until: int | None = None,
    run_id: str | None = None,
    rollout_id: str | None = None,
    name: str | None = None,
    limit: int = 1000,
) -> list[StoredEvent]:
    """Events past one number and up to another, in order."""
    query = select(events).where(events.c.seq > after).order_by(events.c.seq).limit(limit)
    if until is not None:
        query = query.where(events.c.seq <= until)
    if run_id is not None:
        query = query.where(events.c.run_id == run_id)
    if rollout_id is not None:
        query = query.where(events.c.rollout_id == rollout_id)
    if name is not None:
        query = query.where(events.c.name == name)
    return [_event_of(row) for row in connection.execute(query)]


def has_more(connection: Connection, run_id: str, *, after: int, name: str | None = None) -> bool:
    """Whether a run has events past a number, also those that `events` does not give yet."""
    return bool(list_between(connection, after=after, run_id=run_id, name=name, limit=1))


def recent(connection: Connection, run_id: str, *, limit: int = 1000) -> list[StoredEvent]:
    """The last events of a run, newest first."""
    query = select(events).where(events.c.run_id == run_id).order_by(events.c.seq.desc()).limit(limit)
    return [_event_of(row) for row in connection.execute(query)]


def _event_of(row: Any) -> StoredEvent:
    fields = msgspec.json.decode(row.fields)
    event = Event(at=row.at, name=row.name, rollout_id=row.rollout_id, run_id=row.run_id, fields=fields)
    return StoredEvent(row.seq, event)
