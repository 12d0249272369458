"""Rollouts: committed whole in one transaction, read back whole or as lines of a list.

The task, which many rollouts share, is a body of its own; so is every collected file. The trajectory is not written here:
its calls were committed one by one before they were answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, cast, func, insert, select, update

from rollyard.core.errors import StoreError
from rollyard.core.events import Event
from rollyard.core.failure_groups import FailureGroup, group_failures
from rollyard.core.lease import Attempt, Lease
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import blobs, events, leases, runs, texts
from rollyard.store.database import Put
from rollyard.store.schema import artifacts, rollouts, verdicts
from rollyard.store.values import ArtifactInfo, Page, RolloutQuery, RolloutRow, Spent, StoredVerdict, row_of

_ALL = RolloutQuery()
_COLUMNS = tuple(column.name for column in rollouts.columns)
_put_rollouts = Put(rollouts, _COLUMNS, there="fail")
_put_artifacts = Put(artifacts, tuple(column.name for column in artifacts.columns), there="replace")
_body = msgspec.json.Decoder(Rollout)
_task = msgspec.msgpack.Decoder(Task)
_verdict = msgspec.json.Decoder(Verdict)
_ROW = tuple(RolloutRow.__struct_fields__)
LONGEST_PAGE = 1000
WORKDIR = "workdir.tar.gz"  # the artifact that holds the working directory as the agent left it
LOG = "agent.log"  # the artifact that holds all that the agent printed


def commit(
    connection: Connection,
    at: float,
    rollout: Rollout,
    *,
    lease: Lease | None = None,
    last_events: Sequence[Event] = (),
    owes: Sequence[Attempt] = (),
) -> None:
    """Keep a rollout with its verdict, files, artifacts and last events in one transaction. With a lease the attempt is
    settled in the same one, and `LeaseLost` means that nothing was kept. Committing the same rollout again under the
    same lease changes nothing. `owes` are attempts that its run owes from now on."""
    if lease is not None:
        used_up = rollout.failure is not None and rollout.failure.retry
        if not leases.settle(connection, lease, "failed" if used_up else "done", rollout.id):
            return
    task = msgspec.msgpack.encode(rollout.task)
    digest = hashlib.sha256(task).digest()
    blobs.put(connection, {digest: task})
    body = replace(
        rollout, task=Task(id=rollout.task.id, instruction=""), files={}, workdir=None, log=b"", trajectory=None
    )
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
    kept_apart = {WORKDIR: rollout.workdir, LOG: rollout.log or None}
    put_files(connection, rollout.id, {name: data for name, data in kept_apart.items() if data}, collected=False)
    kept = {name: bytes.fromhex(digest) for name, digest in rollout.artifacts.items()}
    rows = [(rollout.id, name, digest, blobs.size(connection, digest), False) for name, digest in kept.items()]
    _put_artifacts.rows(connection, rows)
    texts.add(connection, rollout)
    if owes and rollout.run_id is not None:
        runs.add_attempts(connection, rollout.run_id, owes)
    if last_events:
        events.append(connection, list(last_events))  # last: readers of later events wait until this transaction ends


def put_files(connection: Connection, rollout_id: str, files: Mapping[str, bytes], *, collected: bool) -> None:
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    blobs.put(connection, {digests[name]: data for name, data in files.items()})
    rows = [(rollout_id, name, digests[name], len(data), collected) for name, data in files.items()]
    _put_artifacts.rows(connection, rows)


def add_artifacts(connection: Connection, rollout_id: str, files: Mapping[str, bytes]) -> None:
    """Keep more files with a rollout."""
    put_files(connection, rollout_id, files, collected=False)


def rescore(connection: Connection, at: float, rollout_id: str, verdict: Verdict) -> None:
    """Judge a rollout again: this verdict counts from now on, the earlier ones stay listed."""
    row = connection.execute(select(rollouts.c.body).where(rollouts.c.id == rollout_id)).first()
    if row is None:
        raise _missing_error(rollout_id)
    body = replace(_body.decode(row.body), verdict=verdict)
    changed = {"reward": verdict.reward, "body": msgspec.json.encode(body).decode()}
    connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(**changed))
    _add_verdict(connection, rollout_id, verdict, at)
    texts.remove(connection, rollout_id)  # they have the earlier verdict's log


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


def get(connection: Connection, rollout_id: str) -> Rollout:
    """A rollout with task, verdict, files and the agent's log."""
    row = connection.execute(select(rollouts.c.body, rollouts.c.task).where(rollouts.c.id == rollout_id)).first()
    if row is None:
        raise _missing_error(rollout_id)
    found = replace(_body.decode(row.body), task=_task.decode(blobs.get(connection, row.task)))
    query = select(artifacts).where(artifacts.c.rollout_id == rollout_id, artifacts.c.collected)
    collected = {row.name: blobs.get(connection, row.digest) for row in connection.execute(query)}
    query = select(artifacts).where(artifacts.c.rollout_id == rollout_id, artifacts.c.name.in_((WORKDIR, LOG)))
    kept = {row.name: blobs.get(connection, row.digest) for row in connection.execute(query)}
    return replace(found, files=collected, workdir=kept.get(WORKDIR), log=kept.get(LOG, b""))


def after(
    connection: Connection, run_id: str | None, last: str, limit: int, tasks: dict[bytes, Task]
) -> tuple[list[Rollout], int]:
    """The next rollouts of a run in the order of their ids, without files, and how many characters they are kept in; `tasks`
    remembers those already read."""
    query = select(rollouts.c.body, rollouts.c.task).where(rollouts.c.id > last).order_by(rollouts.c.id).limit(limit)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    rows = [(body, bytes(task)) for body, task in connection.execute(query)]
    unknown = {key for _, key in rows} - tasks.keys()
    tasks |= {key: _task.decode(body) for key, body in blobs.get_several(connection, unknown).items()}
    return [replace(_body.decode(body), task=tasks[key]) for body, key in rows], sum(len(body) for body, _ in rows)


def page(connection: Connection, query: RolloutQuery = _ALL) -> Page:
    """One page of lines, filtered and sorted by the database."""
    chosen: list[ColumnElement[bool]] = []
    for name in ("run_id", "task_id", "agent", "policy", "status", "boundary", "cause", "group_id"):
        value = getattr(query, name)
        if value is not None:
            chosen.append(rollouts.c[name] == value)
    if query.search:
        in_task = rollouts.c.task_id.contains(query.search, autoescape=True)
        chosen.append(in_task | rollouts.c.id.startswith(query.search, autoescape=True))
    total = connection.execute(select(func.count()).select_from(rollouts).where(*chosen)).scalar_one()
    key = rollouts.c[query.sort]
    order = (key.is_(None), key.desc() if query.descending else key.asc(), rollouts.c.id)
    wanted = select(*(rollouts.c[name] for name in _ROW)).where(*chosen).order_by(*order)
    limit = max(1, min(query.limit, LONGEST_PAGE))
    found = connection.execute(wanted.limit(limit).offset(query.offset)).mappings()
    rows = tuple(RolloutRow(**row) for row in found)
    end = query.offset + len(rows)
    return Page(rows=rows, total=total, next=end if rows and end < total else None)


def lines(connection: Connection, run_id: str) -> list[RolloutRow]:
    """Every rollout of a run as the line a list shows of it, in the order of ids: what statistics need, and no bodies."""
    query = select(*(rollouts.c[name] for name in _ROW)).where(rollouts.c.run_id == run_id).order_by(rollouts.c.id)
    return [RolloutRow(**dict(zip(_ROW, row, strict=True))) for row in connection.execute(query)]


def failures(connection: Connection, run_id: str) -> tuple[FailureGroup, ...]:
    """A run's failures by what they say, the most frequent first."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import JSONB

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
    """Tokens of a run's committed rollouts, by policy."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    sums = tuple(func.sum(rollouts.c[name]) for name in names)
    query = select(rollouts.c.policy, *sums).where(rollouts.c.run_id == run_id).group_by(rollouts.c.policy)
    return [Spent(policy, *(int(count or 0) for count in counts)) for policy, *counts in connection.execute(query)]


def verdicts_of(connection: Connection, rollout_id: str) -> list[StoredVerdict]:
    """Every judgement of a rollout, oldest first."""
    query = select(verdicts.c.at, verdicts.c.body).where(verdicts.c.rollout_id == rollout_id).order_by(verdicts.c.id)
    return [StoredVerdict(row.at, _verdict.decode(row.body)) for row in connection.execute(query)]


def artifacts_of(connection: Connection, rollout_id: str) -> list[ArtifactInfo]:
    query = select(artifacts).where(artifacts.c.rollout_id == rollout_id).order_by(artifacts.c.name)
    return [ArtifactInfo(row.name, row.digest.hex(), row.size) for row in connection.execute(query)]


def _missing_error(rollout_id: str) -> StoreError:
    return StoreError(f"no rollout {rollout_id}", hint="rollyard list RUN shows those of a run")
