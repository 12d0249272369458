"""What the compatible APIs keep beside instances, on Redis: a hash each, an index by scope, one of what is due."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from rollyard.core.plane import PlaneRecord, RecordKind
from rollyard.plane.storage.redis.change import Change, Row
from rollyard.plane.storage.redis.rows import BETWEEN, Keys, plane_record, record_row


class RecordRows:
    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    async def put(self, change: Change, wanted: Sequence[PlaneRecord]) -> list[PlaneRecord] | None:
        found = await change.rows([self.keys.record(one.kind, one.scope, one.name) for one in wanted])
        if any(_revision(row) != one.revision for one, row in zip(wanted, found, strict=True)):
            return None
        kept = [replace(one, revision=one.revision + 1) for one in wanted]
        for one in kept:
            change.put(self.keys.record(one.kind, one.scope, one.name), record_row(one))
            change.add(self.keys.records_of(one.kind, one.scope), one.name)
            change.add(self.keys.scopes(one.kind), one.scope)
            member = one.scope + BETWEEN + one.name
            if one.due_at is None:
                change.remove(self.keys.due_records(one.kind), member)
            else:
                change.add(self.keys.due_records(one.kind), member, one.due_at)
        return kept

    async def claim(
        self, change: Change, kind: RecordKind, members: Sequence[str], now: float, until: float
    ) -> list[PlaneRecord]:
        """`members` were due when they were looked for; another may have been first since."""
        keys = [self.keys.record(kind, *member.split(BETWEEN)) for member in members]
        found = [plane_record(row) for row in await change.rows(keys) if row]
        due = [one for one in found if one.due_at is not None and one.due_at <= now]
        return await self.put(change, [replace(one, due_at=until, updated_at=now) for one in due]) or []

    async def drop(self, change: Change, kind: RecordKind, scope: str, names: Sequence[str], *, whole: bool) -> None:
        await change.rows([self.keys.record(kind, scope, name) for name in names])
        for name in names:
            change.drop(self.keys.record(kind, scope, name))
            change.remove(self.keys.records_of(kind, scope), name)
            change.remove(self.keys.due_records(kind), scope + BETWEEN + name)
        if whole:
            change.remove(self.keys.scopes(kind), scope)


def _revision(row: Row) -> int:
    return plane_record(row).revision if row else 0
