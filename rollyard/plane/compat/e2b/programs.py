"""What is kept of a program that a client started: enough for any server to find its job, and what was read of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from rollyard.plane.service.typed_records import TypedRecords


class E2bProgram(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is as the client asked for it; `deadline` is when it is killed, in seconds since 1970."""

    job_id: str
    config: Mapping[str, Any]
    tag: str | None = None
    terminal: bool = False
    deadline: float | None = None
    offsets: Mapping[str, int] = {}


class KeptPrograms:
    """Those of one instance, by their numbers."""

    def __init__(self, records: TypedRecords[E2bProgram], instance_id: str) -> None:
        self._records, self._instance_id = records, instance_id

    async def add(self, pid: int, program: E2bProgram) -> bool:
        """False when there is one of this number."""
        return await self._records.add(self._instance_id, _name(pid), program)

    async def list(self) -> list[tuple[int, E2bProgram]]:
        return [(int(one.record.name), one.value) for one in await self._records.list(self._instance_id)]

    async def note(self, pid: int, offsets: Mapping[str, int]) -> None:
        """What was read of it. It does no harm if another replica wrote meanwhile, or if it is gone."""
        kept = await self._records.get(self._instance_id, _name(pid))
        if kept is not None:
            await self._records.write(self._records.change(kept, replace(kept.value, offsets=dict(offsets))))

    async def drop(self, pid: int) -> None:
        await self._records.drop(self._instance_id, _name(pid))


def _name(pid: int) -> str:
    return f"{pid:09}"
