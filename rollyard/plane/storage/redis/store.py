"""`RedisPlane`: the control plane's storage on Redis. What each method promises is said in
`rollyard.plane.storage.protocol.PlaneStore`, which it has the shape of. How
long an answered write lasts is the server's `appendfsync`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import ConfigError, MissingExtra, PlaneConflict, PlaneNotFound, StoreError
from rollyard.core.log import Log
from rollyard.core.plane import (
    KINDS_OF_INSTANCES,
    AdmissionTerms,
    ApiKey,
    EnvRecord,
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
from rollyard.core.plane_tables import SweepLease, TableQuery
from rollyard.plane.storage.redis import tables
from rollyard.plane.storage.redis.change import Change
from rollyard.plane.storage.redis.hub import RedisHub
from rollyard.plane.storage.redis.instances import InstanceRows, Request, usage_of
from rollyard.plane.storage.redis.records import RecordRows
from rollyard.plane.storage.redis.rows import (
    BETWEEN,
    instance_record,
    key_record,
    key_row,
    plane_record,
    pool_record,
    pool_row,
)

T = TypeVar("T")
_log = Log("rollyard.store")
_TIMEOUT_S = 30.0
_PAGE = 500
_WAITING = 16  # of a pool, looked at in one go


@asynccontextmanager
async def open_redis(url: str) -> AsyncGenerator[RedisPlane]:
    """`redis://[user:password@]host:port/db[?prefix=ry]`. A server that runs no scripts is refused: all or nothing needs them."""
    if find_spec("redis") is None:
        raise MissingExtra("redis", "redis", why="a Redis store")
    from redis.asyncio import Redis
    from redis.exceptions import NoPermissionError, RedisError, ResponseError

    parts = urlsplit(url)
    prefix = parse_qs(parts.query).get("prefix", ["ry"])[0]
    client: Any = Redis.from_url(
        parts._replace(query="").geturl(), socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
    )
    try:
        try:
            await client.eval("return 1", 0)
        except (NoPermissionError, ResponseError) as error:
            raise ConfigError(
                f"the Redis server at {parts.hostname}:{parts.port or 6379} runs no scripts ({error}), and without them two "
                "writers can lose each other's changes",
                hint="let its user run them (ACL SETUSER NAME +@scripting), or keep the plane in SQLite or PostgreSQL",
            ) from error
        yield RedisPlane(client, f"{{{prefix}}}:")
    except RedisError as error:
        raise StoreError(f"Redis: {error}") from error
    finally:
        await client.aclose()


class RedisPlane(RedisHub):
    def __init__(self, client: Any, prefix: str) -> None:
        super().__init__(client, prefix)
        self._rows, self._records = InstanceRows(self._keys), RecordRows(self._keys)

    # instances

    async def begin(self, new: Instance, *, terms: AdmissionTerms, request: Request | None) -> tuple[Instance, bool]:
        return await self._change(lambda change: self._rows.begin(change, new, terms, request))

    async def step(
        self, instance_id: str, origin: tuple[InstanceState, ...], state: InstanceState, *, at: float, **changes: Any
    ) -> Instance | None:
        return await self._change(lambda change: self._rows.step(change, instance_id, origin, state, at, changes))

    async def end(self, instance_id: str, state: InstanceState, *, at: float, reason: str | None) -> bool:
        return await self._change(lambda change: self._rows.end(change, instance_id, state, at, reason))

    async def touch(self, instance_id: str, *, at: float, expires_at: float | None = None) -> Instance | None:
        return await self._change(lambda change: self._rows.touch(change, instance_id, at, expires_at))

    async def get_instance(self, instance_id: str) -> Instance:
        row = await self._row(self._keys.instance(instance_id))
        if not row:
            raise PlaneNotFound(f"there is no instance {instance_id}")
        return instance_record(row)

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
        same = {"owner": owner, "env": env, "run_id": run_id, "rollout_id": rollout_id}
        index, found = self._narrowest(owner, rollout_id, live, labels), list[Instance]()
        while len(found) < limit:
            ids = await self._list_after(index, after, _PAGE)
            for row in await self._read_rows([self._keys.instance(one) for one in ids]):
                if row and _matches(one := instance_record(row), same, live, labels):
                    found.append(one)
            if len(ids) < _PAGE:
                break
            after = ids[-1]
        return found[:limit]

    def _narrowest(
        self, owner: str | None, rollout_id: str | None, live: bool | None, labels: Mapping[str, str]
    ) -> str:
        if rollout_id is not None:
            return self._keys.of_rollout(rollout_id)
        if labels:
            return self._keys.label(*next(iter(labels.items())))
        if owner is not None:
            return self._keys.of_owner(owner, live=live is True)
        return self._keys.live if live is True else self._keys.all

    async def list_changed(self, *, owner: str | None, since: float, limit: int) -> list[Instance]:
        found: list[Instance] = []
        start = 0
        while len(found) < limit:
            ids = await self._client.zrangebyscore(self._keys.changed, since, "+inf", start, _PAGE)
            rows = await self._read_rows([self._keys.instance(one.decode()) for one in ids])
            found += [one for row in rows if row and owner in (None, (one := instance_record(row)).owner)]
            if len(ids) < _PAGE:
                break
            start += _PAGE
        return found[:limit]

    async def counts(self) -> dict[tuple[str, str], int]:
        counted: dict[tuple[str, str], int] = {}
        last = ""
        while True:
            ids = await self._list_after(self._keys.live, last, _PAGE)
            pipe = self._client.pipeline(transaction=False)
            for one in ids:
                pipe.hmget(self._keys.instance(one), "engine", "state")
            for engine, state in await pipe.execute() if ids else ():
                if engine is not None:
                    pair = (engine.decode(), state.decode())
                    counted[pair] = counted.get(pair, 0) + 1
            if len(ids) < _PAGE:
                return counted
            last = ids[-1]

    async def history(self, instance_id: str) -> list[InstanceEvent]:
        lines = await self._row(self._keys.history(instance_id))
        events = [msgspec.json.decode(lines[number]) for number in sorted(lines, key=int)]
        return [InstanceEvent(at=at, state=state, reason=reason) for at, state, reason in events]

    async def set_terms(self, owner: str, **terms: Any) -> OwnerUsage:
        return await self._change(lambda change: self._rows.set_terms(change, owner, terms))

    async def usage(self, owner: str) -> OwnerUsage:
        return usage_of(owner, await self._row(self._keys.owner(owner)))

    # pools and bundles

    async def put_pool(self, pool: WarmPool) -> WarmPool:
        async def work(change: Change) -> WarmPool:
            row = await change.row(self._keys.pool(pool.name))
            kept = replace(pool, created_at=pool_record(row).created_at) if row else pool
            change.put(self._keys.pool(pool.name), pool_row(kept))
            change.add(self._keys.pools, pool.name)
            await self._rows.set_terms(change, pool.owner, {"quota": pool.size})
            return kept

        return await self._change(work)

    async def get_pool(self, name: str) -> WarmPool:
        row = await self._row(self._keys.pool(name))
        if not row:
            raise PlaneNotFound(f"there is no pool {name}")
        return pool_record(row)

    async def list_pools(self) -> list[WarmPool]:
        names = await self._list_after(self._keys.pools, None, 10_000)
        return [pool_record(row) for row in await self._read_rows([self._keys.pool(name) for name in names]) if row]

    async def remove_pool(self, name: str) -> WarmPool:
        async def work(change: Change) -> WarmPool:
            row = await change.row(self._keys.pool(name))
            if not row:
                raise PlaneNotFound(f"there is no pool {name}")
            pool = pool_record(row)
            change.drop(self._keys.pool(name))
            change.remove(self._keys.pools, name)
            await self._rows.set_terms(change, pool.owner, {"quota": 0})
            return pool

        return await self._change(work)

    async def take(
        self, pool: WarmPool, claim: PoolClaim, *, terms: AdmissionTerms, request: Request | None
    ) -> tuple[Instance, bool] | None:
        async def work(change: Change) -> tuple[Instance, bool] | None:
            waiting = await self._list_after(self._keys.of_owner(pool.owner, live=True), None, _WAITING)
            return await self._rows.take(change, waiting, pool, claim, terms, request)

        return await self._change(work)

    async def put_blob(self, digest: str, data: bytes, *, owner: str, at: float) -> bool:
        return bool(await self._client.set(self._keys.blob(digest), data, nx=True))

    async def get_blob(self, digest: str) -> bytes:
        data = await self._client.get(self._keys.blob(digest))
        if data is None:
            raise PlaneNotFound(f"there is no bundle {digest}")
        return data

    async def has_blob(self, digest: str) -> bool:
        return bool(await self._client.exists(self._keys.blob(digest)))

    async def add_owner(self, kind: OwnedKind, name: str, owner: str, *, at: float) -> None:
        await self._client.sadd(self._keys.owned(kind, name), owner)

    async def owners_of(self, kind: OwnedKind, name: str) -> set[str]:
        return {owner.decode() for owner in await self._client.smembers(self._keys.owned(kind, name))}

    # what the compatible APIs keep

    async def put_records(self, wanted: Sequence[PlaneRecord]) -> list[PlaneRecord] | None:
        return await self._change(lambda change: self._records.put(change, wanted))

    async def get_record(self, kind: RecordKind, scope: str, name: str) -> PlaneRecord | None:
        row = await self._row(self._keys.record(kind, scope, name))
        return plane_record(row) if row else None

    async def list_records(
        self, kind: RecordKind, scope: str, *, after: str, limit: int, unfinished: bool = False
    ) -> list[PlaneRecord]:
        found = list[PlaneRecord]()
        while len(found) < limit:
            names = await self._list_after(self._keys.records_of(kind, scope), after, _PAGE)
            rows = await self._read_rows([self._keys.record(kind, scope, name) for name in names])
            kept = [plane_record(row) for row in rows if row]
            found += [one for one in kept if not unfinished or one.due_at is not None]
            if len(names) < _PAGE:
                break
            after = names[-1]
        return found[:limit]

    async def next_due(self, kind: RecordKind) -> float | None:
        found = await self._client.zrange(self._keys.due_records(kind), 0, 0, withscores=True)
        return found[0][1] if found else None

    async def claim_records(self, kind: RecordKind, *, now: float, until: float, limit: int) -> list[PlaneRecord]:
        async def work(change: Change) -> list[PlaneRecord]:
            due = await self._client.zrangebyscore(self._keys.due_records(kind), "-inf", now, 0, limit)
            return await self._records.claim(change, kind, [one.decode() for one in due], now, until)

        return await self._change(work)

    async def drop_records(self, kind: RecordKind, scope: str, name: str | None = None) -> None:
        async def work(change: Change) -> None:
            names = (
                [name] if name is not None else await self._list_after(self._keys.records_of(kind, scope), None, 10_000)
            )
            await self._records.drop(change, kind, scope, names, whole=name is None)

        await self._change(work)

    async def drop_of_ended(self) -> int:
        dropped = 0
        for kind in KINDS_OF_INSTANCES:
            last: str | None = None
            while scopes := await self._list_after(self._keys.scopes(kind), last, _PAGE):
                rows = await self._read_rows([self._keys.instance(scope) for scope in scopes])
                for scope, row in zip(scopes, rows, strict=True):
                    if not row or not instance_record(row).live:
                        await self.drop_records(kind, scope)
                        dropped += 1
                last = scopes[-1]
        return dropped

    # keys

    async def put_key(self, key: ApiKey) -> ApiKey:
        async def work(change: Change) -> ApiKey:
            if await change.row(self._keys.key(key.digest)):
                raise PlaneConflict("this key exists")
            change.put(self._keys.key(key.digest), key_row(key))
            change.add(self._keys.keys, key.id + BETWEEN + key.digest.hex())
            return key

        return await self._change(work)

    async def find_key(self, digest: bytes) -> ApiKey | None:
        row = await self._row(self._keys.key(digest))
        return key_record(row) if row and "revoked_at" not in row else None

    async def list_keys(self) -> list[ApiKey]:
        named = await self._list_after(self._keys.keys, None, 100_000)
        digests = [bytes.fromhex(name.split(BETWEEN)[1]) for name in named]
        return [key_record(row) for row in await self._read_rows([self._keys.key(one) for one in digests]) if row]

    async def revoke_key(self, key_id: str, *, at: float) -> None:
        digest = next((key.digest for key in await self.list_keys() if key.id == key_id), b"")

        async def work(change: Change) -> None:
            row = await change.row(self._keys.key(digest))
            if not row or "revoked_at" in row:
                raise PlaneNotFound(f"there is no key {key_id}")
            change.put(self._keys.key(digest), {**row, "revoked_at": repr(at)})

        await self._change(work)

    # the sweep

    async def agree(self, name: str, proposed: str) -> str:
        key = self._keys.lease(name)

        async def work(change: Change) -> str:
            row = await change.row(key)
            if not row:
                row = {"holder": proposed}
                change.put(key, row)
            return row["holder"]

        return await self._change(work)

    async def take_sweep(self, holder: str, *, now: float, ttl_s: float) -> int | None:
        key = self._keys.lease("sweep")

        async def work(change: Change) -> int | None:
            row = await change.row(key)
            if row and row["holder"] != holder and float(row["expires_at"]) > now:
                return None
            fence = int(row.get("fence", "0")) + 1
            change.put(key, {"holder": holder, "fence": str(fence), "expires_at": repr(now + ttl_s)})
            return fence

        return await self._change(work)

    # tables for people

    async def instances_page(self, look: TableQuery) -> tuple[list[Instance], int]:
        return await tables.instances(self, look)

    async def envs_page(self, look: TableQuery) -> tuple[list[EnvRecord], int]:
        return await tables.envs(self, look)

    async def owners_page(self, look: TableQuery) -> tuple[list[OwnerUsage], int]:
        return await tables.owners(self, look)

    async def count_states(self) -> dict[tuple[str, str], int]:
        return await tables.count_states(self)

    async def sweep_lease(self) -> SweepLease | None:
        row = await self._row(self._keys.lease("sweep"))
        if not row:
            return None
        return SweepLease(holder=row["holder"], fence=int(row["fence"]), expires_at=float(row["expires_at"]))

    async def in_use(self) -> bool:
        return bool(await self._row(self._keys.lease("identity")))

    # the sweep

    async def claim_due(self, fence: int, *, now: float, settle_s: float, limit: int) -> list[Instance]:
        async def work(change: Change) -> list[Instance]:
            due = await self._client.zrangebyscore(self._keys.due, "-inf", now, 0, limit)
            return await self._rows.claim(change, [one.decode() for one in due], fence, now, settle_s)

        return await self._change(work)

    async def finish_due(self, fence: int, ended: list[tuple[str, InstanceState, str]], *, now: float) -> int:
        return await self._change(lambda change: self._rows.finish(change, fence, ended, now))


def _matches(one: Instance, same: Mapping[str, str | None], live: bool | None, labels: Mapping[str, str]) -> bool:
    return (
        all(value is None or getattr(one, name) == value for name, value in same.items())
        and live in (None, one.live)
        and labels.items() <= one.labels.items()
    )
