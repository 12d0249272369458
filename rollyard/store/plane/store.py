"""`SqlPlane`: the control plane's storage on SQLite and PostgreSQL. What each method promises is said in
`rollyard.plane.storage.PlaneStore`, which it has the shape of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rollyard.core.plane import (
    AdmissionTerms,
    ApiKey,
    EnvRecord,
    EnvSpec,
    Happening,
    Instance,
    InstanceState,
    OwnerUsage,
    Taking,
    WarmPool,
)
from rollyard.store.database import Database
from rollyard.store.plane import hub, instances, keys, pools, survey, sweep
from rollyard.store.plane.survey import SweepLease, TableQuery


class SqlPlane:
    def __init__(self, database: Database) -> None:
        self._read, self._write = database.read, database.write

    # environments

    async def create_env(self, record: EnvRecord) -> EnvRecord:
        return await self._write(partial(hub.create, record=record))

    async def get_env(self, name: str, version: str) -> EnvRecord:
        return await self._read(partial(hub.get, name=name, version=version))

    async def update_env(self, name: str, version: str, spec: EnvSpec, *, revision: int | None, at: float) -> EnvRecord:
        return await self._write(partial(hub.replace, name=name, version=version, spec=spec, revision=revision, at=at))

    async def release_env(self, name: str, version: str, *, revision: int | None, at: float) -> EnvRecord:
        return await self._write(partial(hub.release, name=name, version=version, revision=revision, at=at))

    async def delete_env(self, name: str, version: str, *, released: bool) -> None:
        await self._write(partial(hub.remove, name=name, version=version, released=released))

    async def list_envs(
        self, *, words: tuple[str, ...], status: str | None, after: tuple[str, str] | None, limit: int
    ) -> list[EnvRecord]:
        return await self._read(partial(hub.list_envs, words=words, status=status, after=after, limit=limit))

    # instances

    async def begin(
        self, new: Instance, *, terms: AdmissionTerms, request: tuple[str, str, bytes] | None
    ) -> tuple[Instance, bool]:
        return await self._write(partial(instances.begin, new=new, terms=terms, request=request))

    async def step(
        self, instance_id: str, origin: tuple[InstanceState, ...], state: InstanceState, *, at: float, **changes: Any
    ) -> Instance | None:
        return await self._write(
            partial(instances.step, instance_id=instance_id, origin=origin, state=state, at=at, changes=changes)
        )

    async def end(self, instance_id: str, state: InstanceState, *, at: float, reason: str | None) -> bool:
        return await self._write(partial(instances.end, instance_id=instance_id, state=state, at=at, reason=reason))

    async def touch(self, instance_id: str, *, at: float, expires_at: float | None = None) -> Instance | None:
        return await self._write(partial(instances.touch, instance_id=instance_id, at=at, expires_at=expires_at))

    async def get_instance(self, instance_id: str) -> Instance:
        return await self._read(partial(instances.get, instance_id=instance_id))

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
    ) -> list[Instance]:
        work = partial(instances.list_instances, owner=owner, env=env, run_id=run_id, rollout_id=rollout_id, live=live)
        return await self._read(partial(work, wanted=labels, after=after, limit=limit))

    async def history(self, instance_id: str) -> list[Happening]:
        return await self._read(partial(instances.history_of, instance_id=instance_id))

    async def changed(self, *, owner: str | None, since: float, limit: int) -> list[Instance]:
        return await self._read(partial(instances.list_changed, owner=owner, since=since, limit=limit))

    async def counts(self) -> dict[tuple[str, str], int]:
        return await self._read(instances.counts)

    async def set_terms(self, owner: str, **terms: Any) -> OwnerUsage:
        return await self._write(partial(instances.set_terms, owner=owner, terms=terms))

    async def usage(self, owner: str) -> OwnerUsage:
        return await self._read(partial(instances.usage, owner=owner))

    # pools and bundles

    async def put_pool(self, pool: WarmPool) -> WarmPool:
        return await self._write(partial(pools.put, pool=pool))

    async def get_pool(self, name: str) -> WarmPool:
        return await self._read(partial(pools.get, name=name))

    async def list_pools(self) -> list[WarmPool]:
        return await self._read(pools.list_pools)

    async def remove_pool(self, name: str) -> WarmPool:
        return await self._write(partial(pools.remove, name=name))

    async def take(
        self, pool: WarmPool, taking: Taking, *, terms: AdmissionTerms, request: tuple[str, str, bytes] | None
    ) -> tuple[Instance, bool] | None:
        return await self._write(partial(pools.take, pool=pool, taking=taking, terms=terms, request=request))

    async def put_blob(self, digest: str, data: bytes, *, owner: str, at: float) -> bool:
        return await self._write(partial(pools.put_blob, digest=digest, data=data, owner=owner, at=at))

    async def get_blob(self, digest: str) -> bytes:
        return await self._read(partial(pools.get_blob, digest=digest))

    async def has_blob(self, digest: str) -> bool:
        return await self._read(partial(pools.has_blob, digest=digest))

    # keys

    async def put_key(self, key: ApiKey) -> ApiKey:
        return await self._write(partial(keys.put, key=key))

    async def find_key(self, digest: bytes) -> ApiKey | None:
        return await self._read(partial(keys.find, digest=digest))

    async def list_keys(self) -> list[ApiKey]:
        return await self._read(keys.list_keys)

    async def revoke_key(self, key_id: str, *, at: float) -> None:
        await self._write(partial(keys.revoke, key_id=key_id, at=at))

    # tables for people

    async def instances_page(self, look: TableQuery) -> tuple[list[Instance], int]:
        """The rows wanted, and how many there are in all."""
        return await self._read(partial(survey.instances, look=look))

    async def envs_page(self, look: TableQuery) -> tuple[list[EnvRecord], int]:
        return await self._read(partial(survey.envs, look=look))

    async def owners_page(self, look: TableQuery) -> tuple[list[OwnerUsage], int]:
        return await self._read(partial(survey.owners, look=look))

    async def ever(self) -> dict[tuple[str, str], int]:
        """Instances by engine and state, those that are gone too."""
        return await self._read(survey.ever)

    async def sweep_lease(self) -> SweepLease | None:
        return await self._read(survey.sweep_lease)

    async def in_use(self) -> bool:
        """Whether a control plane was ever here."""
        return await self._read(survey.in_use)

    # the sweep

    async def agreed(self, name: str, proposed: str) -> str:
        return await self._write(partial(sweep.agree, name=name, proposed=proposed))

    async def take_sweep(self, holder: str, *, now: float, ttl_s: float) -> int | None:
        return await self._write(partial(sweep.take, holder=holder, now=now, ttl_s=ttl_s))

    async def claim_due(self, fence: int, *, now: float, settle_s: float, limit: int) -> list[Instance]:
        return await self._write(partial(sweep.claim, fence=fence, now=now, settle_s=settle_s, limit=limit))

    async def finish_due(self, fence: int, ended: list[tuple[str, InstanceState, str]], *, now: float) -> int:
        return await self._write(partial(sweep.finish, fence=fence, ended=ended, now=now))
