"""The control plane's records as tables for people: what a page asks of them, and what it is shown."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from rollyard.core.plane import EnvRecord, Instance, InstanceEvent, OwnerUsage

InstanceSortKey = Literal["created_at", "id", "owner", "env", "engine", "state", "expires_at", "last_seen_at"]
EnvSortKey = Literal["name", "version", "status", "updated_at"]
OwnerSortKey = Literal["owner", "used", "quota"]


class TableQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What part of a table is wanted. `same` are columns with the value they must have."""

    search: str | None = None
    same: dict[str, Any] = {}
    sort: str
    descending: bool = False
    limit: int = 50
    offset: int = 0


class SweepLease(msgspec.Struct, frozen=True, kw_only=True):
    """Who sweeps; `fence` counts the rounds of all replicas."""

    holder: str
    fence: int
    expires_at: float


class PlaneTableRecords(Protocol):
    """Pages are the rows wanted, and how many there are in all."""

    async def get_instance(self, instance_id: str) -> Instance: ...
    async def history(self, instance_id: str) -> list[InstanceEvent]: ...
    async def instances_page(self, look: TableQuery) -> tuple[list[Instance], int]: ...
    async def envs_page(self, look: TableQuery) -> tuple[list[EnvRecord], int]: ...
    async def owners_page(self, look: TableQuery) -> tuple[list[OwnerUsage], int]: ...
    async def count_states(self) -> dict[tuple[str, str], int]:
        """How many instances each engine has in each state, those that are gone too."""
        ...

    async def sweep_lease(self) -> SweepLease | None: ...
    async def in_use(self) -> bool:
        """Whether a control plane was ever here."""
        ...
