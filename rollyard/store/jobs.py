"""Jobs: runs that a server was asked for, kept so that a server that is started again goes on with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select, update

from rollyard.core.rollout_job import OPEN_JOBS, JobState, RolloutJob
from rollyard.store.database import Put
from rollyard.store.schema import jobs

_FIELDS = tuple(RolloutJob.__struct_fields__)
_put_jobs = Put(jobs, _FIELDS, there="keep")


def add(connection: Connection, job: RolloutJob) -> RolloutJob:
    """Keep the job, or give the one that its owner has created under the same key."""
    _put_jobs.rows(connection, [tuple(getattr(job, name) for name in _FIELDS)])
    query = select(jobs).where(jobs.c.owner == job.owner, jobs.c.key == job.key)
    return _as_job(connection.execute(query).mappings().one())


def get(connection: Connection, job_id: str) -> RolloutJob | None:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().first()
    return None if row is None else _as_job(row)


def list_jobs(
    connection: Connection,
    *,
    owner: str | None = None,
    states: Sequence[JobState] = (),
    after: str = "",
    limit: int = 100,
) -> list[RolloutJob]:
    """In the order of their ids, which is that of their making, from the one after `after`."""
    query = select(jobs).where(jobs.c.id > after).order_by(jobs.c.id).limit(limit)
    if owner is not None:
        query = query.where(jobs.c.owner == owner)
    if states:
        query = query.where(jobs.c.state.in_(states))
    return [_as_job(row) for row in connection.execute(query).mappings()]


def count_open(connection: Connection, owner: str) -> int:
    query = select(func.count()).where(jobs.c.owner == owner, jobs.c.state.in_(OPEN_JOBS))
    return connection.execute(query).scalar_one()


def move(connection: Connection, at: float, job_id: str, state: JobState, *, error: str = "") -> bool:
    """To another state; False for a job that has ended, which stays as it is."""
    moved = update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(OPEN_JOBS))
    return bool(connection.execute(moved.values(state=state, error=error, updated_at=at)).rowcount)


def _as_job(row: Any) -> RolloutJob:
    return RolloutJob(**row)
