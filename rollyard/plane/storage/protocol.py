"""`PlaneStore`: what the control plane needs of a database, and what each method promises to any number of replicas.

`sql/` has it on SQLite and PostgreSQL (`SqlPlane`), `redis/` on Redis (`RedisPlane`). Methods raise `PlaneError`s; nothing here
knows of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollyard.core.plane import (
    AdmissionTerms,
    ApiKey,
    EnvRecord,
    EnvSpec,
    Instance,
    InstanceEvent,
    InstanceState,
    OwnedKind,
    OwnerUsage,
    PlaneRecord,
    PoolClaim,
    RecordKind,
    WarmPool,
)
from rollyard.core.plane_tables import PlaneTableRecords


class PlaneStore(PlaneTableRecords, Protocol):
    async def now(self) -> float:
        """The time, as the storage's server has it: the same for all replicas."""
        ...

    async def create_env(self, record: EnvRecord) -> EnvRecord:
        """Raises `PlaneConflict` when name@version exists."""
        ...

    async def get_env(self, name: str, version: str) -> EnvRecord: ...
    async def update_env(self, name: str, version: str, spec: EnvSpec, *, revision: int | None, at: float) -> EnvRecord:
        """Raises `PlaneConflict` when the record is released or not at this revision any more; then nothing changed."""
        ...

    async def release_env(self, name: str, version: str, *, revision: int | None, at: float) -> EnvRecord: ...
    async def delete_env(self, name: str, version: str, *, released: bool) -> None: ...
    async def list_envs(
        self, *, words: tuple[str, ...], status: str | None, after: tuple[str, str] | None, limit: int
    ) -> list[EnvRecord]: ...

    async def begin(
        self, new: Instance, *, terms: AdmissionTerms, request: tuple[str, str, bytes] | None
    ) -> tuple[Instance, bool]:
        """Journal an instance before anything is made; False when this request made one before. Raises `PlaneQuota` and
        `PlaneRateLimited`; both hold whatever runs at the same time, here and in other replicas."""
        ...

    async def step(
        self, instance_id: str, origin: tuple[InstanceState, ...], state: InstanceState, *, at: float, **changes: Any
    ) -> Instance | None: ...
    async def end(self, instance_id: str, state: InstanceState, *, at: float, reason: str | None) -> bool:
        """True for exactly one caller, which returned the quota."""
        ...

    async def touch(self, instance_id: str, *, at: float, expires_at: float | None = None) -> Instance | None: ...
    async def get_instance(self, instance_id: str) -> Instance: ...
    async def list_instances(
        self,
        *,
        owner: str | None,
        env: str | None,
        run_id: str | None,
        rollout_id: str | None,
        live: bool | None,
        labels: Mapping[str, str],
        after: str,
        limit: int,
    ) -> list[Instance]: ...
    async def history(self, instance_id: str) -> list[InstanceEvent]: ...
    async def list_changed(self, *, owner: str | None, since: float, limit: int) -> list[Instance]:
        """Those whose state or end changed at `since` or later, oldest change first; also those that have ended."""
        ...

    async def counts(self) -> dict[tuple[str, str], int]:
        """Live instances by engine and state."""
        ...

    async def set_terms(self, owner: str, **terms: Any) -> OwnerUsage:
        """`quota`, `rate`, or both."""
        ...

    async def usage(self, owner: str) -> OwnerUsage: ...

    async def put_pool(self, pool: WarmPool) -> WarmPool:
        """Its size is the quota of the owner `pool.owner`."""
        ...

    async def get_pool(self, name: str) -> WarmPool: ...
    async def list_pools(self) -> list[WarmPool]: ...
    async def remove_pool(self, name: str) -> WarmPool: ...
    async def take(
        self, pool: WarmPool, claim: PoolClaim, *, terms: AdmissionTerms, request: tuple[str, str, bytes] | None
    ) -> tuple[Instance, bool] | None:
        """One that waits in the pool becomes the taker's, for exactly one taker; None when none waits."""
        ...

    async def put_blob(self, digest: str, data: bytes, *, owner: str, at: float) -> bool:
        """False when it was there."""
        ...

    async def get_blob(self, digest: str) -> bytes: ...
    async def has_blob(self, digest: str) -> bool: ...

    async def add_owner(self, kind: OwnedKind, name: str, owner: str, *, at: float) -> None:
        """One more owner of it; again is no harm."""
        ...

    async def owners_of(self, kind: OwnedKind, name: str) -> set[str]: ...

    async def put_records(self, wanted: Sequence[PlaneRecord]) -> list[PlaneRecord] | None:
        """All of them as they are kept now, or None and nothing changed: one is not at the revision that its change saw (0 for
        one that is new). Several new ones have names that were never used before."""
        ...

    async def get_record(self, kind: RecordKind, scope: str, name: str) -> PlaneRecord | None: ...
    async def list_records(
        self, kind: RecordKind, scope: str, *, after: str, limit: int, unfinished: bool = False
    ) -> list[PlaneRecord]:
        """By name; `unfinished` are those with something left to do."""
        ...

    async def next_due(self, kind: RecordKind) -> float | None: ...
    async def claim_records(self, kind: RecordKind, *, now: float, until: float, limit: int) -> list[PlaneRecord]:
        """Those that are due, longest due first, each for exactly one caller; they are due again at `until`."""
        ...

    async def drop_records(self, kind: RecordKind, scope: str, name: str | None = None) -> None:
        """One, or all of the scope."""
        ...

    async def drop_of_ended(self) -> int:
        """What was kept about instances that have ended."""
        ...

    async def put_key(self, key: ApiKey) -> ApiKey: ...
    async def find_key(self, digest: bytes) -> ApiKey | None: ...
    async def list_keys(self) -> list[ApiKey]: ...
    async def revoke_key(self, key_id: str, *, at: float) -> None: ...

    async def agree(self, name: str, proposed: str) -> str:
        """What all replicas share under this name: the first proposal stays. `sweep` is not a name for it."""
        ...

    async def take_sweep(self, holder: str, *, now: float, ttl_s: float) -> int | None: ...
    async def claim_due(self, fence: int, *, now: float, settle_s: float, limit: int) -> list[Instance]:
        """What is due, as it was; it is now `deleting`, unless it does not end with its time. Raises `LeaseLost` when another
        replica sweeps."""
        ...

    async def finish_due(self, fence: int, ended: list[tuple[str, InstanceState, str]], *, now: float) -> int: ...
