"""`TypedRecords`: values of one type that an API keeps beside its instances, on every replica and after a restart the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import PlaneConflict
from rollyard.core.plane import PlaneRecord, RecordKind
from rollyard.plane.storage.protocol import PlaneStore

T = TypeVar("T")
WAITS = 1e15  # never due: another record's end makes it due
_PAGE = 500
_TRIES = 100


class TypedRecord(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A value, and the record that it was read from."""

    value: T
    record: PlaneRecord


class TypedRecords(Generic[T]):
    """All values of one kind, each by a scope (an owner, a job, an instance) and a name in it."""

    def __init__(
        self, store: PlaneStore, kind: RecordKind, type: type[T], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._clock = store, clock
        self._kind: RecordKind = kind
        self._decoder = msgspec.json.Decoder(type)

    async def get(self, scope: str, name: str) -> TypedRecord[T] | None:
        found = await self._store.get_record(self._kind, scope, name)
        return None if found is None else self._read(found)

    async def list(self, scope: str, *, unfinished: bool = False, limit: int | None = None) -> list[TypedRecord[T]]:
        """By name."""
        found: list[PlaneRecord] = []
        while limit is None or len(found) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            after = found[-1].name if found else ""
            page = await self._store.list_records(self._kind, scope, after=after, limit=size, unfinished=unfinished)
            found += page
            if len(page) < size:
                break
        return [self._read(one) for one in found]

    def draft(self, scope: str, name: str, value: T, *, due_at: float | None = None) -> PlaneRecord:
        """A new record, for `write`."""
        now, data = self._clock(), msgspec.json.encode(value).decode()
        return PlaneRecord(
            kind=self._kind, scope=scope, name=name, data=data, created_at=now, updated_at=now, due_at=due_at
        )

    def change(self, kept: TypedRecord[T], value: T, *, due_at: float | None = None) -> PlaneRecord:
        """The same record with another value, for `write`."""
        data = msgspec.json.encode(value).decode()
        return replace(kept.record, data=data, updated_at=self._clock(), due_at=due_at)

    async def write(self, *records: PlaneRecord) -> bool:
        """All or none, of any kind; False when one of them was changed since it was read."""
        return await self._store.put_records(records) is not None

    async def put(self, kept: TypedRecord[T], value: T, *, due_at: float | None = None) -> TypedRecord[T] | None:
        """Another value in its place; None when it was changed since it was read."""
        found = await self._store.put_records([self.change(kept, value, due_at=due_at)])
        return None if found is None else TypedRecord(value=value, record=found[0])

    async def add(self, scope: str, name: str, value: T) -> bool:
        """False when there is one."""
        return await self.write(self.draft(scope, name, value))

    async def update(self, scope: str, name: str, work: Callable[[T | None], T]) -> T:
        """`work` is given what is there, or None, and may run again when another was first."""
        for _ in range(_TRIES):
            kept = await self.get(scope, name)
            value = work(None if kept is None else kept.value)
            record = self.draft(scope, name, value) if kept is None else self.change(kept, value)
            if await self.write(record):
                return value
        raise PlaneConflict(f"{self._kind} {name} is changed by too many at once", hint="try again")

    async def drop(self, scope: str, name: str | None = None) -> None:
        """One, or all of the scope."""
        await self._store.drop_records(self._kind, scope, name)

    # work that a server has to take up

    async def next_due(self) -> float | None:
        return await self._store.next_due(self._kind)

    async def claim(self, hold_s: float, limit: int) -> list[TypedRecord[T]]:
        """Those that are due, for this caller alone until `hold_s` from now."""
        now = self._clock()
        found = await self._store.claim_records(self._kind, now=now, until=now + hold_s, limit=limit)
        return [self._read(one) for one in found]

    async def hold(self, kept: TypedRecord[T], hold_s: float) -> TypedRecord[T] | None:
        """Claimed for so much longer; None when another has claimed it since."""
        now = self._clock()
        found = await self._store.put_records([replace(kept.record, due_at=now + hold_s, updated_at=now)])
        return None if found is None else TypedRecord(value=kept.value, record=found[0])

    def _read(self, record: PlaneRecord) -> TypedRecord[T]:
        return TypedRecord(value=self._decoder.decode(record.data), record=record)
