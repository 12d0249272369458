"""Warm pools and bundles. What waits in a pool is an instance like any other, owned by the pool: the pool's size is that
owner's quota, so it is as exact as a quota is. PoolClaim one is a change of owner, in one transaction."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from rollyard.core.errors import PlaneNotFound
from rollyard.core.plane import AdmissionTerms, Instance, PoolClaim, WarmPool
from rollyard.plane.storage.sql import instances as rows
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_blobs as blobs
from rollyard.store.schema import plane_instances as instances
from rollyard.store.schema import plane_labels as labels
from rollyard.store.schema import plane_owners as owners
from rollyard.store.schema import plane_pools as pools


def put(connection: Connection, pool: WarmPool) -> WarmPool:
    """A new size for one that is there; what waits in it stays."""
    row = {"name": pool.name, "size": pool.size, "plan": pool.plan, "created_at": pool.created_at}
    if not insert_new(connection, pools, row):
        connection.execute(update(pools).where(pools.c.name == pool.name).values(size=pool.size, plan=pool.plan))
    rows.set_terms(connection, pool.owner, quota=pool.size)
    return get(connection, pool.name)


def get(connection: Connection, name: str) -> WarmPool:
    row = connection.execute(select(pools).where(pools.c.name == name)).mappings().first()
    if row is None:
        raise PlaneNotFound(f"there is no pool {name}")
    return WarmPool(**row)


def list_pools(connection: Connection) -> list[WarmPool]:
    return [WarmPool(**row) for row in connection.execute(select(pools).order_by(pools.c.name)).mappings()]


def remove(connection: Connection, name: str) -> WarmPool:
    """Nothing more is made for it; what waits in it is the caller's to end."""
    pool = get(connection, name)
    connection.execute(delete(pools).where(pools.c.name == name))
    rows.set_terms(connection, pool.owner, quota=0)
    return pool


def take(
    connection: Connection,
    pool: WarmPool,
    claim: PoolClaim,
    *,
    terms: AdmissionTerms,
    request: tuple[str, str, bytes] | None,
) -> tuple[Instance, bool] | None:
    """One that waits is the caller's now (and True), or the one this request took before; None when none waits."""
    if request is not None:
        before = rows.find_request(connection, request)
        if before is not None:
            return before, False
    waiting = (instances.c.owner == pool.owner, instances.c.live.is_(True), instances.c.state == "running")
    found = (
        connection.execute(
            select(instances)
            .where(*waiting, instances.c.expires_at > claim.at)
            .order_by(instances.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        .mappings()
        .first()
    )
    if found is None:
        return None
    rows.admit(connection, claim.owner, terms, claim.at)
    connection.execute(update(owners).where(owners.c.owner == pool.owner).values(used=owners.c.used - 1))
    if request is not None:
        rows.remember(connection, request, found["id"], claim.at)
    connection.execute(
        update(instances).where(instances.c.id == found["id"]).values(**_changes(claim), updated_at=claim.at)
    )
    if claim.labels:
        new = [{"instance_id": found["id"], "name": name, "value": value} for name, value in claim.labels.items()]
        connection.execute(insert(labels), new)
    rows.add_history(connection, [(found["id"], claim.at, "running", f"taken from pool {pool.name}")])
    return rows.get(connection, found["id"]), True


def _changes(claim: PoolClaim) -> dict[str, Any]:
    return {
        "owner": claim.owner,
        "run_id": claim.run_id,
        "rollout_id": claim.rollout_id,
        "labels": msgspec.json.encode(claim.labels).decode(),
        "idle_ttl_s": claim.idle_ttl_s,
        "last_seen_at": claim.at,
    }


# bundles


def put_blob(connection: Connection, digest: str, data: bytes, *, owner: str, at: float) -> bool:
    row = {"digest": digest, "owner": owner, "size": len(data), "created_at": at, "data": data}
    return insert_new(connection, blobs, row)


def get_blob(connection: Connection, digest: str) -> bytes:
    data = connection.execute(select(blobs.c.data).where(blobs.c.digest == digest)).scalar()
    if data is None:
        raise PlaneNotFound(f"there is no bundle {digest}")
    return data


def has_blob(connection: Connection, digest: str) -> bool:
    return connection.execute(select(blobs.c.size).where(blobs.c.digest == digest)).first() is not None
