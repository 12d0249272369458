"""Runs and what they owe: their attempts. Who does an attempt, and for how long, is `leases`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from rollyard.core.errors import StoreError
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt, AttemptState
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
    "image",
    "gpus",
)
_put_attempts = Put(attempts, (*_ATTEMPT, "position", "fence"), there="keep")


def create(connection: Connection, at: float, config: Mapping[str, Any], *, id: str | None = None) -> str:
    """Keep a run's config, which is any JSON object; gives its id."""
    run_id = id or new_id("run")
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


def progress(connection: Connection, run_id: str) -> dict[AttemptState, int]:
    """How many attempts are in each state."""
    query = select(attempts.c.state, func.count()).where(attempts.c.run_id == run_id).group_by(attempts.c.state)
    return {state: count for state, count in connection.execute(query)}


def attempts_of(connection: Connection, run_id: str) -> list[Attempt]:
    query = select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.position)
    return [as_attempt(row) for row in connection.execute(query).mappings()]


def get(connection: Connection, run_id: str) -> RunInfo:
    row = connection.execute(select(runs).where(runs.c.id == run_id)).first()
    if row is None:
        raise StoreError(f"no run {run_id}", hint="rollyard list shows those there are")
    counts = select(func.count(), func.count(rollouts.c.reward), func.avg(rollouts.c.reward))
    return _info(
        row, progress(connection, run_id), *connection.execute(counts.where(rollouts.c.run_id == run_id)).one()
    )


def has(connection: Connection, run_id: str) -> bool:
    return connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is not None


def list_runs(
    connection: Connection,
    *,
    search: str | None = None,
    sort: RunSortKey = "created_at",
    descending: bool = True,
    limit: int = 50,
    offset: int = 0,
) -> list[RunInfo]:
    """Newest first, unless sorted otherwise. `search` is a part of a run's id or of its config."""
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
    states: dict[str, dict[AttemptState, int]] = {row.id: {} for row in found}
    counted = select(attempts.c.run_id, attempts.c.state, func.count()).where(attempts.c.run_id.in_(states))
    for run_id, state, count in connection.execute(counted.group_by(attempts.c.run_id, attempts.c.state)):
        states[run_id][state] = count
    return [_info(row, states[row.id], row.rollouts or 0, row.scored or 0, row.mean_reward) for row in found]


def _info(row: Any, states: Mapping[AttemptState, int], count: int, scored: int, mean: float | None) -> RunInfo:
    return RunInfo(
        id=row.id,
        created_at=row.created_at,
        config=msgspec.json.decode(row.config),
        attempts=states,
        rollouts=count,
        scored=scored,
        mean_reward=mean,
    )


def as_attempt(row: Mapping[Any, Any]) -> Attempt:
    return Attempt(**{name: row[name] for name in _ATTEMPT})
