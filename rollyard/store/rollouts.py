"""Rollouts: committed whole in one transaction, read back whole or as lines of a list.

The task, which many rollouts share, is a body of its own; so is every collected file. The trajectory is not written here:
its calls were committed one by one before they were answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Select, cast, func, insert, select, update
from sqlalchemy.dialects.postgresql import JSONB

from rollyard.core.errors import StoreError
from rollyard.core.events import Event
from rollyard.core.failure_groups import FailureGroup, group_failures
from rollyard.core.lease import Lease
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import blobs, events, leases
from rollyard.store.database import Put
from rollyard.store.schema import artifacts, rollouts, verdicts
from rollyard.store.values import ArtifactInfo, Page, RolloutRow, SortKey, Spent, StoredVerdict, row_of

_COLUMNS = tuple(column.name for column in rollouts.columns)
_put_rollouts = Put(rollouts, _COLUMNS, there="fail")
_put_artifacts = Put(artifacts, tuple(column.name for column in artifacts.columns), there="replace")
_body = msgspec.json.Decoder(Rollout)
_task = msgspec.msgpack.Decoder(Task)
_verdict = msgspec.json.Decoder(Verdict)
_ROW = tuple(RolloutRow.__struct_fields__)
LONGEST_PAGE = 1000
WORKDIR = "workdir.tar.gz"  # the artifact that holds the working directory as the agent left it


def commit(connection: Connection, rollout: Rollout, lease: Lease | None, at: float, told: Sequence[Event]) -> None:
    """All of a rollout, or nothing. With a lease it also settles the attempt, and a lost lease commits nothing."""
    if lease is not None:
        used_up = rollout.failure is not None and rollout.failure.retry
        if not leases.settle(connection, lease, "failed" if used_up else "done", rollout.id):
            return
    task = msgspec.msgpack.encode(rollout.task)
    digest = hashlib.sha256(task).digest()
    blobs.put(connection, {digest: task})
    body = replace(rollout, task=Task(id=rollout.task.id, instruction=""), files={}, workdir=None, trajectory=None)
    values = {
        **msgspec.structs.asdict(row_of(rollout)),
        "fence": lease.fence if lease is not None else rollout.fence,
        "task": digest,
        "body": msgspec.json.encode(body).decode(),
    }
    _put_rollouts.rows(connection, [tuple(values[name] for name in _COLUMNS)])
    if rollout.verdict is not None:
        _add_verdict(connection, rollout.id, rollout.verdict, at)
    put_files(connection, rollout.id, rollout.files, collected=True)
    if rollout.workdir is not None:
        put_files(connection, rollout.id, {WORKDIR: rollout.workdir}, collected=False)
    kept = {name: bytes.fromhex(digest) for name, digest in rollout.artifacts.items()}
    rows = [(rollout.id, name, digest, blobs.size(connection, digest), False) for name, digest in kept.items()]
    _put_artifacts.rows(connection, rows)
    if told:
        events.append(connection, list(told))  # last: on PostgreSQL appending takes turns


def put_files(connection: Connection, rollout_id: str, files: Mapping[str, bytes], *, collected: bool) -> None:
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    blobs.put(connection, {digests[name]: data for name, data in files.items()})
    rows = [(rollout_id, name, digests[name], len(data), collected) for name, data in files.items()]
    _put_artifacts.rows(connection, rows)


def rescore(connection: Connection, rollout_id: str, verdict: Verdict, at: float) -> None:
    """A later judgement takes the place of the earlier one, which stays in the list of verdicts."""
    row = connection.execute(select(rollouts.c.body).where(rollouts.c.id == rollout_id)).first()
    if row is None:
        raise _missing(rollout_id)
    body = replace(_body.decode(row.body), verdict=verdict)
    changed = {"reward": verdict.reward, "body": msgspec.json.encode(body).decode()}
    connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(**changed))
    _add_verdict(connection, rollout_id, verdict, at)


def _add_verdict(connection: Connection, rollout_id: str, verdict: Verdict, at: float) -> None:
    connection.execute(
        insert(verdicts).values(
            rollout_id=rollout_id,
            at=at,
            reward=verdict.reward,
            status=verdict.status,
            body=msgspec.json.encode(verdict).decode(),
        )
    )


def get(connection: Connection, rollout_id: str, *, files: bool) -> Rollout:
    row = connection.execute(select(rollouts.c.body, rollouts.c.task).where(rollouts.c.id == rollout_id)).first()
    if row is None:
        raise _missing(rollout_id)
    found = replace(_body.decode(row.body), task=_task.decode(blobs.get(connection, row.task)))
    if not files:
        return found
    query = select(artifacts).where(artifacts.c.rollout_id == rollout_id, artifacts.c.collected)
    collected = {row.name: blobs.get(connection, row.digest) for row in connection.execute(query)}
    query = select(artifacts.c.digest).where(artifacts.c.rollout_id == rollout_id, artifacts.c.name == WORKDIR)
    kept = connection.execute(query).scalar()
    return replace(found, files=collected, workdir=None if kept is None else blobs.get(connection, kept))


def after(connection: Connection, run_id: str | None, last: str, limit: int, tasks: dict[bytes, Task]) -> list[Rollout]:
    """The next rollouts of a run in the order of their ids, without files; `tasks` remembers those already read."""
    query = select(rollouts.c.body, rollouts.c.task).where(rollouts.c.id > last).order_by(rollouts.c.id).limit(limit)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    found: list[Rollout] = []
    for row in connection.execute(query).all():
        key = bytes(row.task)
        if key not in tasks:
            tasks[key] = _task.decode(blobs.get(connection, key))
        found.append(replace(_body.decode(row.body), task=tasks[key]))
    return found


def page(
    connection: Connection,
    *,
    run_id: str | None,
    task_id: str | None,
    agent: str | None,
    status: str | None,
    policy: str | None,
    boundary: str | None,
    group_id: str | None,
    search: str | None,
    sort: SortKey,
    descending: bool,
    limit: int,
    offset: int,
) -> Page:
    same = {"run_id": run_id, "task_id": task_id, "agent": agent, "status": status, "boundary": boundary}
    same |= {"group_id": group_id, "policy": policy}
    limit = max(1, min(limit, LONGEST_PAGE))

    def chosen(query: Select[Any]) -> Select[Any]:
        for name, value in same.items():
            if value is not None:
                query = query.where(rollouts.c[name] == value)
        if search:
            query = query.where(
                rollouts.c.task_id.contains(search, autoescape=True) | rollouts.c.id.startswith(search, autoescape=True)
            )
        return query

    total = connection.execute(chosen(select(func.count()).select_from(rollouts))).scalar_one()
    key = rollouts.c[sort]
    order = (key.is_(None), key.desc() if descending else key.asc(), rollouts.c.id)
    query = chosen(select(*(rollouts.c[name] for name in _ROW))).order_by(*order).limit(limit).offset(offset)
    rows = tuple(RolloutRow(**row) for row in connection.execute(query).mappings())
    end = offset + len(rows)
    return Page(rows=rows, total=total, next=end if rows and end < total else None)


def lines(connection: Connection, run_id: str) -> list[RolloutRow]:
    """Every line of a run, in the order of ids."""
    query = select(*(rollouts.c[name] for name in _ROW)).where(rollouts.c.run_id == run_id).order_by(rollouts.c.id)
    return [RolloutRow(**dict(zip(_ROW, row, strict=True))) for row in connection.execute(query)]


def failures(connection: Connection, run_id: str) -> tuple[FailureGroup, ...]:
    if connection.dialect.name == "postgresql":
        message = cast(rollouts.c.body, JSONB)[("failure", "message")].astext
    else:
        message = func.json_extract(rollouts.c.body, "$.failure.message")
    columns = (rollouts.c.boundary, rollouts.c.cause, message)
    query = select(*columns, func.count(), func.min(rollouts.c.started_at))
    query = query.where(rollouts.c.run_id == run_id, rollouts.c.boundary.is_not(None)).group_by(*columns)
    return group_failures(
        FailureGroup(boundary=boundary, cause=cause or "unknown", message=text or "", count=count)
        for boundary, cause, text, count, _ in sorted(connection.execute(query), key=lambda row: row[-1])
    )


def count_tokens(connection: Connection, run_id: str) -> list[Spent]:
    sums = (func.sum(rollouts.c.prompt_tokens), func.sum(rollouts.c.completion_tokens))
    query = select(rollouts.c.policy, *sums).where(rollouts.c.run_id == run_id).group_by(rollouts.c.policy)
    return [
        Spent(policy, int(prompt or 0), int(answered or 0)) for policy, prompt, answered in connection.execute(query)
    ]


def verdicts_of(connection: Connection, rollout_id: str) -> list[StoredVerdict]:
    query = select(verdicts.c.at, verdicts.c.body).where(verdicts.c.rollout_id == rollout_id).order_by(verdicts.c.id)
    return [StoredVerdict(row.at, _verdict.decode(row.body)) for row in connection.execute(query)]


def artifacts_of(connection: Connection, rollout_id: str) -> list[ArtifactInfo]:
    query = select(artifacts).where(artifacts.c.rollout_id == rollout_id).order_by(artifacts.c.name)
    return [ArtifactInfo(row.name, row.digest.hex(), row.size) for row in connection.execute(query)]


def _missing(rollout_id: str) -> StoreError:
    return StoreError(f"no rollout {rollout_id}", hint="rollyard list RUN shows those of a run")
