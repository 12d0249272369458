"""Instances, their history and their owners' quota.

The quota is a counter per owner that changes in the same transaction as the instance's `live` flag and by one conditional
statement, so it is exact whatever runs at the same time. Every step names the states it may start from; one that comes
too late changes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from rollyard.core.errors import PlaneConflict, PlaneNotFound, PlaneQuota
from rollyard.core.plane import Happening, Instance, InstancePlan, InstanceState, Usage
from rollyard.store.plane.insert import insert_new
from rollyard.store.schema import plane_history as history
from rollyard.store.schema import plane_instances as instances
from rollyard.store.schema import plane_labels as labels
from rollyard.store.schema import plane_owners as owners
from rollyard.store.schema import plane_requests as requests

_UNLIMITED = 2**31 - 1
_COLUMNS = (
    *("id", "owner", "env", "run_id", "engine", "ref", "state", "live", "reason", "idle_ttl_s"),
    *("created_at", "updated_at", "expires_at", "last_seen_at", "settle_by", "ended_at"),
)


def begin(
    connection: Connection, new: Instance, default_quota: int | None, request: tuple[str, str, bytes] | None
) -> tuple[Instance, bool]:
    """Journal an intention: quota, row and history at once. `request` is (caller, Idempotency-Key, digest of the body); the
    same one again gives the instance it made and False."""
    if request is not None:
        caller, name, digest = request
        row = {"caller": caller, "name": name, "digest": digest, "instance_id": new.id, "created_at": new.created_at}
        if not insert_new(connection, requests, row):
            return _asked_before(connection, caller, name, digest), False
    insert_new(connection, owners, {"owner": new.owner, "used": 0})
    limit = func.coalesce(owners.c.quota, _UNLIMITED if default_quota is None else default_quota)
    taken = connection.execute(
        update(owners).where(owners.c.owner == new.owner, owners.c.used < limit).values(used=owners.c.used + 1)
    )
    if not taken.rowcount:
        found = usage(connection, new.owner)
        quota = default_quota if found.quota is None else found.quota
        raise PlaneQuota(f"{new.owner} has {found.used} of {quota} instances", hint="delete one, or ask for more quota")
    values = {name: getattr(new, name) for name in _COLUMNS}
    values["plan"] = msgspec.json.encode(new.plan).decode()
    values["labels"] = msgspec.json.encode(new.labels).decode()
    connection.execute(insert(instances).values(**values))
    if new.labels:
        rows = [{"instance_id": new.id, "name": name, "value": value} for name, value in new.labels.items()]
        connection.execute(insert(labels), rows)
    _happened(connection, [(new.id, new.created_at, new.state, None)])
    return new, True


def _asked_before(connection: Connection, caller: str, name: str, digest: bytes) -> Instance:
    row = (
        connection.execute(select(requests).where(requests.c.caller == caller, requests.c.name == name))
        .mappings()
        .one()
    )
    if row["digest"] != digest:
        raise PlaneConflict("this Idempotency-Key came with another request", hint="use a new key for a new request")
    return get(connection, row["instance_id"])


def step(
    connection: Connection,
    instance_id: str,
    origin: tuple[InstanceState, ...],
    state: InstanceState,
    at: float,
    changes: Mapping[str, Any],
) -> Instance | None:
    """Go from one of `origin` to `state`; None when the instance is in another state by now."""
    row = (
        connection.execute(
            update(instances)
            .where(instances.c.id == instance_id, instances.c.state.in_(origin))
            .values(state=state, updated_at=at, **changes)
            .returning(instances)
        )
        .mappings()
        .first()
    )
    if row is None:
        return None
    _happened(connection, [(instance_id, at, state, changes.get("reason"))])
    return record(row)


def end(connection: Connection, instance_id: str, state: InstanceState, at: float, reason: str | None) -> bool:
    """It is gone: its place in the quota comes back exactly once, whoever says it first."""
    ended = connection.execute(
        update(instances)
        .where(instances.c.id == instance_id, instances.c.live.is_(True))
        .values(state=state, live=False, ended_at=at, updated_at=at, reason=reason)
        .returning(instances.c.owner)
    ).first()
    if ended is None:
        return False
    connection.execute(update(owners).where(owners.c.owner == ended[0]).values(used=owners.c.used - 1))
    _happened(connection, [(instance_id, at, state, reason)])
    return True


def touch(connection: Connection, instance_id: str, at: float, expires_at: float | None) -> Instance | None:
    """A sign of life, with a new end of its time where one is given; None when it does not run."""
    values: dict[str, float] = {"last_seen_at": at}
    if expires_at is not None:
        values["expires_at"] = expires_at
    running = (instances.c.id == instance_id, instances.c.state == "running")
    row = connection.execute(update(instances).where(*running).values(**values).returning(instances)).mappings().first()
    return None if row is None else record(row)


def get(connection: Connection, instance_id: str) -> Instance:
    row = connection.execute(select(instances).where(instances.c.id == instance_id)).mappings().first()
    if row is None:
        raise PlaneNotFound(f"there is no instance {instance_id}")
    return record(row)


def listed(
    connection: Connection,
    owner: str | None,
    env: str | None,
    run_id: str | None,
    live: bool | None,
    wanted: Mapping[str, str],
    after: str,
    limit: int,
) -> list[Instance]:
    """In the order of creation, from past the id `after`."""
    query = select(instances).where(instances.c.id > after).order_by(instances.c.id).limit(limit)
    for column, value in ((instances.c.owner, owner), (instances.c.env, env), (instances.c.run_id, run_id)):
        if value is not None:
            query = query.where(column == value)
    if live is not None:
        query = query.where(instances.c.live.is_(live))
    for name, value in wanted.items():
        having = select(labels.c.instance_id).where(labels.c.name == name, labels.c.value == value)
        query = query.where(instances.c.id.in_(having))
    return [record(row) for row in connection.execute(query).mappings()]


def history_of(connection: Connection, instance_id: str) -> list[Happening]:
    rows = connection.execute(
        select(history).where(history.c.instance_id == instance_id).order_by(history.c.seq)
    ).mappings()
    return [Happening(at=row["at"], state=row["state"], reason=row["reason"]) for row in rows]


def set_quota(connection: Connection, owner: str, quota: int | None) -> Usage:
    insert_new(connection, owners, {"owner": owner, "used": 0})
    connection.execute(update(owners).where(owners.c.owner == owner).values(quota=quota))
    return usage(connection, owner)


def usage(connection: Connection, owner: str) -> Usage:
    row = connection.execute(select(owners).where(owners.c.owner == owner)).mappings().first()
    return Usage(owner=owner, used=row["used"] if row else 0, quota=row["quota"] if row else None)


def record(row: Any) -> Instance:
    return Instance(
        plan=msgspec.json.decode(row["plan"], type=InstancePlan),
        labels=msgspec.json.decode(row["labels"]),
        **{name: row[name] for name in _COLUMNS},
    )


def _happened(connection: Connection, lines: Iterable[tuple[str, float, str, str | None]]) -> None:
    rows = [{"instance_id": id, "at": at, "state": state, "reason": reason} for id, at, state, reason in lines]
    connection.execute(insert(history), rows)
