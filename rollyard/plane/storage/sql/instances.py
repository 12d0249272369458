"""Instances, their history and their owners' quota.

The quota is a counter per owner that changes in the same transaction as the instance's `live` flag and by one conditional
statement, so it is exact whatever runs at the same time. Every step names the states it may start from; one that comes
too late changes nothing and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    Float,
    Integer,
    Update,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from rollyard.core.errors import PlaneConflict, PlaneError, PlaneNotFound, PlaneQuota, PlaneRateLimited
from rollyard.core.plane import AdmissionTerms, Instance, InstanceEvent, InstancePlan, InstanceState, OwnerUsage
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.plane.storage.sql.prepared import PreparedStatement
from rollyard.store.database import Put
from rollyard.store.schema import plane_history as history
from rollyard.store.schema import plane_instances as instances
from rollyard.store.schema import plane_labels as label_rows
from rollyard.store.schema import plane_owners as owners
from rollyard.store.schema import plane_requests as requests

_UNLIMITED = 2**31 - 1
_COLUMNS = (
    *("id", "owner", "env", "run_id", "rollout_id", "engine", "ref", "state", "live", "reason", "idle_ttl_s"),
    *("created_at", "updated_at", "expires_at", "last_seen_at", "settle_by", "ended_at"),
)


def _charge() -> Update:
    """One more for an owner, where quota and rate allow it. Built once: it runs for every creation."""
    limit = func.coalesce(owners.c.quota, bindparam("default_quota", type_=Integer))
    rate = func.coalesce(owners.c.rate, bindparam("default_rate", type_=Float))
    gap = 1.0 / func.nullif(rate, 0.0)  # NULL: no rate
    now, early = bindparam("now", type_=Float), bindparam("early", type_=Float)
    on_time = or_(gap.is_(None), owners.c.next_at <= now + gap * early)
    later = func.coalesce(case((owners.c.next_at > now, owners.c.next_at), else_=now) + gap, owners.c.next_at)
    mine = (owners.c.owner == bindparam("who"), owners.c.used < limit, on_time)
    return update(owners).where(*mine).values(used=owners.c.used + 1, next_at=later)


_CHARGE = PreparedStatement(_charge())
_put_instances = Put(instances, (*_COLUMNS, "plan", "labels"), there="fail")
_put_history = Put(history, ("instance_id", "at", "state", "reason"), there="fail")
_plan = msgspec.json.Decoder(InstancePlan)


@cache
def _step(origin: tuple[InstanceState, ...], changed: tuple[str, ...]) -> PreparedStatement:
    """A step from these states that changes these columns too."""
    new = {name: bindparam(f"new_{name}", type_=instances.c[name].type) for name in ("state", "updated_at", *changed)}
    mine = (instances.c.id == bindparam("which"), or_(*(instances.c.state == literal_column(f"'{s}'") for s in origin)))
    return PreparedStatement(update(instances).where(*mine).values(new).returning(instances))


def begin(
    connection: Connection, new: Instance, *, terms: AdmissionTerms, request: tuple[str, str, bytes] | None
) -> tuple[Instance, bool]:
    """Journal an intention: quota, row and history at once. `request` is (caller, Idempotency-Key, digest of the body); the
    same one again gives the instance it made and False."""
    if request is not None and not remember(connection, request, new.id, new.created_at):
        before = find_request(connection, request)
        assert before is not None
        return before, False
    admit(connection, new.owner, terms, new.created_at)
    texts = (msgspec.json.encode(new.plan).decode(), msgspec.json.encode(new.labels).decode())
    _put_instances.rows(connection, [(*(getattr(new, name) for name in _COLUMNS), *texts)])
    if new.labels:
        rows = [{"instance_id": new.id, "name": name, "value": value} for name, value in new.labels.items()]
        connection.execute(insert(label_rows), rows)
    add_history(connection, [(new.id, new.created_at, new.state, new.reason)])
    return new, True


def admit(connection: Connection, owner: str, terms: AdmissionTerms, now: float) -> None:
    """One more instance for this owner: the quota and the rate are checked and charged by one statement. The rate is kept
    as the time from which the next creation is on time; a burst may come before it."""
    said = {
        "who": owner,
        "default_quota": _UNLIMITED if terms.quota is None else terms.quota,
        "default_rate": terms.rate or 0.0,
        "early": max(terms.burst, 1) - 1,
        "now": now,
    }
    if _CHARGE.count(connection, said):
        return
    # Or wait for the transaction that inserts it
    insert_new(connection, owners, {"owner": owner, "used": 0, "next_at": 0.0})
    if not _CHARGE.count(connection, said):
        row = connection.execute(select(owners).where(owners.c.owner == owner)).mappings().one()
        used = OwnerUsage(owner=owner, used=row["used"], quota=row["quota"], rate=row["rate"])
        raise refusal(used, terms, row["next_at"], now)


def refusal(usage: OwnerUsage, terms: AdmissionTerms, next_at: float, now: float) -> PlaneError:
    """Why an owner gets no more."""
    quota = terms.quota if usage.quota is None else usage.quota
    if quota is not None and usage.used >= quota:
        hint = "delete one, or ask for more quota"
        return PlaneQuota(f"{usage.owner} has {usage.used} of {quota} instances", hint=hint)
    rate = usage.rate or terms.rate or 1.0
    wait = max(0.0, next_at - now - (max(terms.burst, 1) - 1) / rate)
    return PlaneRateLimited(
        f"{usage.owner} creates more than {rate:g} instances a second", retry_after=wait, hint=f"wait {wait:.3f} s"
    )


def remember(connection: Connection, request: tuple[str, str, bytes], instance_id: str, at: float) -> bool:
    """Which instance a request made; False when it made one before."""
    caller, name, digest = request
    row = {"caller": caller, "name": name, "digest": digest, "instance_id": instance_id, "created_at": at}
    return insert_new(connection, requests, row)


def find_request(connection: Connection, request: tuple[str, str, bytes]) -> Instance | None:
    caller, name, digest = request
    mine = (requests.c.caller == caller, requests.c.name == name)
    row = connection.execute(select(requests).where(*mine)).mappings().first()
    if row is None:
        return None
    if row["digest"] != digest:
        raise PlaneConflict("this Idempotency-Key came with another request", hint="use a new key for a new request")
    return get(connection, row["instance_id"])


def step(
    connection: Connection,
    instance_id: str,
    origin: tuple[InstanceState, ...],
    state: InstanceState,
    *,
    at: float,
    **changes: Any,
) -> Instance | None:
    """Go from one of `origin` to `state`; None when the instance is in another state by now."""
    new = {"state": state, "updated_at": at, **changes}
    said = {"which": instance_id, **{f"new_{name}": value for name, value in new.items()}}
    row = _step(origin, tuple(changes)).first(connection, said)
    if row is None:
        return None
    add_history(connection, [(instance_id, at, state, changes.get("reason"))])
    return record(row)


def end(connection: Connection, instance_id: str, state: InstanceState, *, at: float, reason: str | None) -> bool:
    """It is gone: its place in the quota comes back exactly once, with the first caller that says so."""
    return end_many(connection, [instance_id], state, at, reason) == 1


def end_many(
    connection: Connection, instance_ids: Sequence[str], state: InstanceState, at: float, reason: str | None
) -> int:
    """How many of them were live and are ended now; the others had ended before."""
    ended = connection.execute(
        update(instances)
        .where(instances.c.id.in_(instance_ids), instances.c.live.is_(True))
        .values(state=state, live=False, ended_at=at, updated_at=at, reason=reason)
        .returning(instances.c.id, instances.c.owner)
    ).all()
    given_back = Counter(owner for _, owner in ended)
    for owner, count in sorted(given_back.items()):
        # In one order everywhere, so that two sweeps cannot lock each other out
        connection.execute(update(owners).where(owners.c.owner == owner).values(used=owners.c.used - count))
    if ended:
        add_history(connection, [(instance_id, at, state, reason) for instance_id, _ in ended])
    return len(ended)


def touch(connection: Connection, instance_id: str, *, at: float, expires_at: float | None = None) -> Instance | None:
    """A sign of life, with a new end of its time where one is given; None when it has ended or is not there yet."""
    values: dict[str, float] = {"last_seen_at": at}
    if expires_at is not None:
        values |= {"expires_at": expires_at, "updated_at": at}
    running = (instances.c.id == instance_id, instances.c.state.in_(("running", "paused")))
    row = connection.execute(update(instances).where(*running).values(**values).returning(instances)).mappings().first()
    return None if row is None else record(row)


def get(connection: Connection, instance_id: str) -> Instance:
    row = connection.execute(select(instances).where(instances.c.id == instance_id)).mappings().first()
    if row is None:
        raise PlaneNotFound(f"there is no instance {instance_id}")
    return record(row)


def list_instances(
    connection: Connection,
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
    """In the order of creation, from past the id `after`."""
    query = select(instances).where(instances.c.id > after).order_by(instances.c.id).limit(limit)
    for name, value in (("owner", owner), ("env", env), ("run_id", run_id), ("rollout_id", rollout_id)):
        if value is not None:
            query = query.where(instances.c[name] == value)
    if live is not None:
        query = query.where(instances.c.live.is_(live))
    for name, value in labels.items():
        having = select(label_rows.c.instance_id).where(label_rows.c.name == name, label_rows.c.value == value)
        query = query.where(instances.c.id.in_(having))
    return [record(row) for row in connection.execute(query).mappings()]


def history_of(connection: Connection, instance_id: str) -> list[InstanceEvent]:
    rows = connection.execute(
        select(history).where(history.c.instance_id == instance_id).order_by(history.c.seq)
    ).mappings()
    return [InstanceEvent(at=row["at"], state=row["state"], reason=row["reason"]) for row in rows]


def list_changed(connection: Connection, *, owner: str | None, since: float, limit: int) -> list[Instance]:
    """Those whose state or terms changed at `since` or later, oldest change first; also those that have ended."""
    query = select(instances).where(instances.c.updated_at >= since)
    if owner is not None:
        query = query.where(instances.c.owner == owner)
    query = query.order_by(instances.c.updated_at, instances.c.id).limit(limit)
    return [record(row) for row in connection.execute(query).mappings()]


def set_terms(connection: Connection, owner: str, **terms: Any) -> OwnerUsage:
    """`quota`, `rate`, or both."""
    insert_new(connection, owners, {"owner": owner, "used": 0, "next_at": 0.0})
    connection.execute(update(owners).where(owners.c.owner == owner).values(**terms))
    return usage(connection, owner)


def usage(connection: Connection, owner: str) -> OwnerUsage:
    row = connection.execute(select(owners).where(owners.c.owner == owner)).mappings().first()
    if row is None:
        return OwnerUsage(owner=owner, used=0, quota=None)
    return OwnerUsage(owner=owner, used=row["used"], quota=row["quota"], rate=row["rate"])


def counts(connection: Connection) -> dict[tuple[str, str], int]:
    """Live instances by engine and state."""
    query = select(instances.c.engine, instances.c.state, func.count()).where(instances.c.live.is_(True))
    rows = connection.execute(query.group_by(instances.c.engine, instances.c.state))
    return {(engine, state): count for engine, state, count in rows}


def record(row: Any) -> Instance:
    fields: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    fields["live"] = bool(row["live"])
    return Instance(plan=_plan.decode(row["plan"]), labels=msgspec.json.decode(row["labels"]), **fields)


def add_history(connection: Connection, lines: Iterable[tuple[str, float, str, str | None]]) -> None:
    _put_history.rows(connection, list(lines))
