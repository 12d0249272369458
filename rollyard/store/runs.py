"""Runs, their attempts, and the leases under which attempts are done.

A claim raises the attempt's fencing number. Everything a claimant does afterwards shows that number, so one that was
presumed dead and wakes up changes nothing. Times are the caller's; processes that share a store share a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, func, or_, select, update

from rollyard.core.errors import LeaseLost, StoreError
from rollyard.core.lease import Attempt, AttemptState, Lease
from rollyard.store.database import Put
from rollyard.store.schema import attempts, rollouts, runs
from rollyard.store.values import RunInfo, RunSortKey

_put_runs = Put(runs, ("id", "created_at", "config"), there="fail")
_ATTEMPT = (
    "id",
    "run_id",
    "task_id",
    "task_digest",
    "agent",
    "policy",
    "number",
    "seed",
    "state",
    "tries",
    "rollout_id",
)
_put_attempts = Put(attempts, (*_ATTEMPT, "position", "fence"), there="keep")


def create(connection: Connection, run_id: str, config: Mapping[str, Any], at: float) -> str:
    _put_runs.rows(connection, [(run_id, at, msgspec.json.encode(config).decode())])
    return run_id


def add_attempts(connection: Connection, run_id: str, new: Iterable[Attempt]) -> None:
    """In the order given, after those there are; one that is there already is left alone."""
    first = connection.execute(
        select(func.coalesce(func.max(attempts.c.position), -1)).where(attempts.c.run_id == run_id)
    ).scalar_one()
    rows = [
        (*(getattr(attempt, name) if name != "run_id" else run_id for name in _ATTEMPT), first + 1 + index, 0)
        for index, attempt in enumerate(new)
    ]
    _put_attempts.rows(connection, rows)


def claim(connection: Connection, run_id: str, owner: str, now: float, ttl_s: float) -> Lease | None:
    """The first attempt that is owed, or whose lease has run out."""
    free = or_(attempts.c.state == "owed", and_(attempts.c.state == "leased", attempts.c.expires_at <= now))
    found = connection.execute(
        select(attempts)
        .where(attempts.c.run_id == run_id, free)
        .order_by(attempts.c.position)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = found.mappings().first()
    if row is None:
        return None
    changed = {"state": "leased", "owner": owner, "expires_at": now + ttl_s}
    changed |= {"fence": row["fence"] + 1, "tries": row["tries"] + 1}
    connection.execute(update(attempts).where(attempts.c.id == row["id"]).values(**changed))
    return _lease({**row, **changed})


def renew(connection: Connection, lease: Lease, now: float, ttl_s: float) -> Lease:
    """A lease that ran out but that nobody has claimed since is still its owner's."""
    changed = connection.execute(update(attempts).where(_held(lease)).values(expires_at=now + ttl_s))
    if not changed.rowcount:
        raise lost(lease)
    return msgspec.structs.replace(lease, expires_at=now + ttl_s)


def give_back(connection: Connection, lease: Lease) -> bool:
    """The attempt is owed again. False when the lease was lost, and then nothing changes."""
    changed = connection.execute(update(attempts).where(_held(lease)).values(state="owed", owner=None, expires_at=None))
    return bool(changed.rowcount)


def settle(connection: Connection, lease: Lease, state: AttemptState, rollout_id: str) -> None:
    changed = connection.execute(
        update(attempts).where(_held(lease)).values(state=state, owner=None, expires_at=None, rollout_id=rollout_id)
    )
    if not changed.rowcount:
        raise lost(lease)


def lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"the claim on attempt {lease.attempt.id} is no longer {lease.owner}'s (fence {lease.fence})")


def leases(connection: Connection, run_id: str) -> list[Lease]:
    """Claims that are out, run out or not."""
    query = select(attempts).where(attempts.c.run_id == run_id, attempts.c.state == "leased")
    return [_lease(row) for row in connection.execute(query.order_by(attempts.c.position)).mappings()]


def progress(connection: Connection, run_id: str) -> dict[AttemptState, int]:
    query = select(attempts.c.state, func.count()).where(attempts.c.run_id == run_id).group_by(attempts.c.state)
    return {state: count for state, count in connection.execute(query)}


def attempts_of(connection: Connection, run_id: str) -> list[Attempt]:
    query = select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.position)
    return [_attempt(row) for row in connection.execute(query).mappings()]


def get(connection: Connection, run_id: str) -> RunInfo:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).first()
    if row is None:
        raise StoreError(f"no run {run_id}", hint="rollyard list shows those there are")
    counts = select(func.count(), func.count(rollouts.c.reward), func.avg(rollouts.c.reward))
    return _info(connection, row, *connection.execute(counts.where(rollouts.c.run_id == run_id)).one())


def listed(
    connection: Connection, *, search: str | None, sort: RunSortKey, descending: bool, limit: int, offset: int
) -> list[RunInfo]:
    counts = (
        select(
            rollouts.c.run_id,
            func.count().label("rollouts"),
            func.count(rollouts.c.reward).label("scored"),
            func.avg(rollouts.c.reward).label("mean_reward"),
        )
        .group_by(rollouts.c.run_id)
        .subquery()
    )
    query = select(runs, counts.c.rollouts, counts.c.scored, counts.c.mean_reward)
    query = query.outerjoin(counts, counts.c.run_id == runs.c.id)
    if search:
        query = query.where(
            runs.c.id.contains(search, autoescape=True) | runs.c.config.contains(search, autoescape=True)
        )
    key = counts.c[sort] if sort in ("rollouts", "scored", "mean_reward") else runs.c[sort]
    order = (key.is_(None), key.desc() if descending else key.asc(), runs.c.id.desc())
    found = connection.execute(query.order_by(*order).limit(limit).offset(offset)).all()
    return [_info(connection, row, row.rollouts or 0, row.scored or 0, row.mean_reward) for row in found]


def _info(connection: Connection, row: Any, count: int, scored: int, mean: float | None) -> RunInfo:
    return RunInfo(
        id=row.id,
        created_at=row.created_at,
        config=msgspec.json.decode(row.config),
        attempts=progress(connection, row.id),
        rollouts=count,
        scored=scored,
        mean_reward=mean,
    )


def _held(lease: Lease) -> Any:
    return and_(attempts.c.id == lease.attempt.id, attempts.c.fence == lease.fence, attempts.c.state == "leased")


def _attempt(row: Mapping[Any, Any]) -> Attempt:
    return Attempt(**{name: row[name] for name in _ATTEMPT})


def _lease(row: Mapping[Any, Any]) -> Lease:
    return Lease(attempt=_attempt(row), owner=row["owner"], fence=row["fence"], expires_at=row["expires_at"])
