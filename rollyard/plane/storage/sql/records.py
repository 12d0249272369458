"""What the compatible APIs keep beside instances: one row each, changed only by who saw its last revision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection, and_, delete, exists, func, insert, select, update

from rollyard.core.plane import KINDS_OF_INSTANCES, PlaneRecord, RecordKind
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_instances as instances
from rollyard.store.schema import plane_records as records

_COLUMNS = tuple(PlaneRecord.__struct_fields__)


def put(connection: Connection, wanted: Sequence[PlaneRecord]) -> list[PlaneRecord] | None:
    kept = [replace(one, revision=one.revision + 1) for one in wanted]
    new, changed = [one for one in kept if one.revision == 1], [one for one in kept if one.revision > 1]
    for one in changed:
        seen = select(records.c.revision).where(_is(one.kind, one.scope, one.name)).with_for_update()
        if connection.execute(seen).scalar() != one.revision - 1:
            return None
    if len(new) == 1 and not insert_new(connection, records, _row(new[0])):
        return None
    if len(new) > 1:  # under names that were never used before, or it is an error
        connection.execute(insert(records), [_row(one) for one in new])
    for one in changed:
        connection.execute(update(records).where(_is(one.kind, one.scope, one.name)).values(_row(one)))
    return kept


def get(connection: Connection, kind: RecordKind, scope: str, name: str) -> PlaneRecord | None:
    row = connection.execute(select(records).where(_is(kind, scope, name))).mappings().first()
    return None if row is None else _record(row)


def list_records(
    connection: Connection, kind: RecordKind, scope: str, *, after: str, limit: int, unfinished: bool = False
) -> list[PlaneRecord]:
    wanted = select(records).where(records.c.kind == kind, records.c.scope == scope, records.c.name > after)
    if unfinished:
        wanted = wanted.where(records.c.due_at.is_not(None))
    return [_record(row) for row in connection.execute(wanted.order_by(records.c.name).limit(limit)).mappings()]


def next_due(connection: Connection, kind: RecordKind) -> float | None:
    return connection.execute(select(func.min(records.c.due_at)).where(records.c.kind == kind)).scalar()


def claim(connection: Connection, kind: RecordKind, *, now: float, until: float, limit: int) -> list[PlaneRecord]:
    due = (
        select(records)
        .where(records.c.kind == kind, records.c.due_at <= now)
        .order_by(records.c.due_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    found = [_record(row) for row in connection.execute(due).mappings()]
    return put(connection, [replace(one, due_at=until, updated_at=now) for one in found]) or []


def drop(connection: Connection, kind: RecordKind, scope: str, name: str | None = None) -> None:
    wanted = delete(records).where(records.c.kind == kind, records.c.scope == scope)
    connection.execute(wanted if name is None else wanted.where(records.c.name == name))


def drop_of_ended(connection: Connection) -> int:
    """A look at the instance of each record, of which there are few: those that have ended may be very many."""
    over = exists().where(instances.c.id == records.c.scope, instances.c.live.is_(False))
    wanted = delete(records).where(records.c.kind.in_(KINDS_OF_INSTANCES), over)
    return connection.execute(wanted).rowcount


def _is(kind: RecordKind, scope: str, name: str) -> Any:
    return and_(records.c.kind == kind, records.c.scope == scope, records.c.name == name)


def _row(record: PlaneRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _COLUMNS}


def _record(row: Any) -> PlaneRecord:
    return PlaneRecord(**{name: row[name] for name in _COLUMNS})
