"""`Store`: the durable record of runs, rollouts, calls, events and bodies.

    async with Store.open("runs.db") as store: ...

Each method is one transaction or one consistent read. A method that writes returns once the write would survive SIGKILL.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rollyard.core.call import CallRecord
from rollyard.core.delta import Blob
from rollyard.core.errors import ConfigError
from rollyard.core.events import POLICY_STOPPED, Event
from rollyard.core.failure_groups import FailureGroup
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt, AttemptState, Lease
from rollyard.core.node import Node
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import blobs, calls, clean, events, leases, rollouts, runs
from rollyard.store.database import Database
from rollyard.store.migrate import prepare
from rollyard.store.plane import SqlPlane
from rollyard.store.sqlite import SQLite, Synchronous
from rollyard.store.sqlite_file import check_place, keep_private, restore
from rollyard.store.values import (
    ArtifactInfo,
    Page,
    RolloutRow,
    RunInfo,
    RunSortKey,
    SortKey,
    Spent,
    StoredEvent,
    StoredVerdict,
)
from rollyard.trajectory.trajectory import Trajectory

_STREAMED = 64  # rollouts read at once while streaming


class Store:
    """Made by `Store.open`. It is a `CallLog` for the gate."""

    def __init__(self, database: Database, clock: Callable[[], float] | None, where: str) -> None:
        self._database = database
        self._clock = clock or time.time
        self._own_clock = clock is not None or database.kind == "sqlite"
        self.where = where

    @property
    def shared(self) -> bool:
        """Whether processes on other machines can open it too."""
        return self._database.kind != "sqlite"

    def _now(self) -> float | None:
        """The time that decides about leases; None leaves it to the database's server."""
        return self._clock() if self._own_clock else None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: str | Path,
        *,
        create: bool = True,
        private: bool = False,
        synchronous: Synchronous = "normal",
        wait_s: float = 10.0,
        clock: Callable[[], float] | None = None,
    ) -> AsyncGenerator[Store]:
        """`where` is a path, `sqlite:///path` or `postgresql://user@host/name`. A new database is set up, with `create=False`
        refused; an older one is brought up to date; a newer one is refused. A new file appears with the first write. `private`
        refuses a file that other users can read. `wait_s` is how long the first
        connection to PostgreSQL is tried. `clock` decides when leases run out; without one this machine's does, and on PostgreSQL
        the server's."""
        database = _database(str(where), synchronous, create=create, private=private, wait_s=wait_s)
        try:
            await prepare(database, create=create)
            yield cls(database, clock, str(where))
        finally:
            await database.aclose()

    @property
    def plane(self) -> SqlPlane:
        """The control plane's records, in the same database."""
        return SqlPlane(self._database)

    # calls: what the gate needs

    async def commit(self, record: CallRecord, nodes: Sequence[Node], blobs: Mapping[bytes, Blob]) -> None:
        """Keep one call with the nodes and bodies it added. Raises `SessionClosed` once its session is closed."""
        await self._database.write(partial(calls.commit, record=record, added=nodes, bodies=blobs))

    async def save_session(self, session: SessionRecord) -> None:
        await self._database.write(partial(calls.save_session, session=session))

    async def close_session(self, rollout_id: str, at: float) -> None:
        """From here on `commit` refuses calls of this rollout."""
        await self._database.write(partial(calls.close_session, rollout_id=rollout_id, at=at))

    async def session(self, rollout_id: str) -> SessionRecord | None:
        return await self._database.read(partial(calls.session, rollout_id=rollout_id))

    async def sessions(self) -> Sequence[SessionRecord]:
        return await self._database.read(calls.all_sessions)

    async def load_calls(self, rollout_id: str) -> tuple[Sequence[CallRecord], Sequence[Node]]:
        return await self._database.read(partial(calls.load, rollout_id=rollout_id))

    async def load_blob(self, digest: bytes) -> bytes:
        return await self._database.read(partial(blobs.get, digest=digest))

    async def trajectory(self, rollout_id: str) -> Trajectory:
        """The graph of a rollout's calls, as it was when the last of them was committed."""
        return Trajectory.restore(rollout_id, *await self.load_calls(rollout_id))

    # runs and the leases under which their attempts are done

    async def create_run(self, config: Mapping[str, Any], *, id: str | None = None) -> str:
        """Keep a run's config, which is any JSON object; gives its id."""
        run_id = id or new_id("run")
        return await self._database.write(partial(runs.create, run_id=run_id, config=config, at=self._clock()))

    async def get_run(self, run_id: str) -> RunInfo:
        return await self._database.read(partial(runs.get, run_id=run_id))

    async def list_runs(
        self,
        *,
        search: str | None = None,
        sort: RunSortKey = "created_at",
        descending: bool = True,
        limit: int = 50,
        offset: int = 0,
    ) -> list[RunInfo]:
        """Newest first, unless sorted otherwise. `search` is a part of a run's id or of its config."""
        work = partial(runs.list_runs, search=search, sort=sort, descending=descending, limit=limit, offset=offset)
        return await self._database.read(work)

    async def add_attempts(self, run_id: str, attempts: Iterable[Attempt]) -> None:
        """What the run owes, handed out in this order. An attempt that is there already is left alone."""
        await self._database.write(partial(runs.add_attempts, run_id=run_id, new=list(attempts)))

    async def attempts(self, run_id: str) -> list[Attempt]:
        return await self._database.read(partial(runs.attempts_of, run_id=run_id))

    async def progress(self, run_id: str) -> Mapping[AttemptState, int]:
        """How many attempts are in each state."""
        return await self._database.read(partial(runs.progress, run_id=run_id))

    async def claim(
        self, run_id: str, *, owner: str, ttl_s: float, concurrency: Mapping[str, int] | None = None
    ) -> Lease | None:
        """The next attempt that is owed or whose lease ran out, with a fencing number nobody had before; None if all are
        out or done. No policy named in `concurrency` gets more than that many at a time, whoever claims them."""
        return await self._database.write(
            partial(
                leases.claim,
                run_id=run_id,
                owner=owner,
                now=self._now(),
                ttl_s=ttl_s,
                concurrency=concurrency or {},
            )
        )

    async def pause(self, run_id: str, policy: str, for_s: float) -> None:
        """Hand out nothing that this policy answers for a while, on any machine: its server is overloaded or away."""
        work = partial(leases.pause, run_id=run_id, policy=policy, now=self._now(), for_s=for_s)
        await self._database.write(work)

    async def heartbeat(self, lease: Lease, *, ttl_s: float) -> Lease:
        """Keep a claim for another `ttl_s`. Raises `LeaseLost` once somebody else has claimed the attempt."""
        return await self._database.write(partial(leases.renew, lease=lease, now=self._now(), ttl_s=ttl_s))

    async def heartbeats(self, held: Sequence[Lease], *, ttl_s: float) -> set[str]:
        """The same for all leases of a worker at once; gives the ids of attempts whose leases were lost."""
        if not held:
            return set()
        return await self._database.write(partial(leases.renew_all, held=held, now=self._now(), ttl_s=ttl_s))

    async def reclaim(self, run_id: str) -> int:
        """Attempts whose leases ran out are owed again, each in its old place; gives how many."""
        return await self._database.write(partial(leases.reclaim, run_id=run_id, now=self._now()))

    async def release(self, lease: Lease, *, after_s: float = 0.0) -> bool:
        """Give an attempt back undone; it is owed again, though not before `after_s`. False, and nothing changes, when the
        lease was lost."""
        return await self._database.write(partial(leases.give_back, lease=lease, now=self._now(), after_s=after_s))

    async def expire(self, lease: Lease) -> bool:
        """End the lease of an owner that is known to be dead, before its time is up."""
        return await self.release(lease)

    async def withdraw(self, attempt_ids: Sequence[str]) -> list[str]:
        """Attempts that nobody wants any more; gives those that were not done. One that is under way cannot be committed."""
        return await self._database.write(partial(leases.withdraw, attempt_ids=attempt_ids))

    async def leases(self, run_id: str) -> list[Lease]:
        """Claims that are out, whether their time is up or not."""
        return await self._database.read(partial(leases.list_leases, run_id=run_id))

    async def spent(self, run_id: str) -> list[Spent]:
        """Tokens of a run's committed rollouts, by policy."""
        return await self._database.read(partial(rollouts.count_tokens, run_id=run_id))

    # rollouts

    async def commit_rollout(self, rollout: Rollout, *, lease: Lease | None = None, told: Sequence[Event] = ()) -> None:
        """Keep a rollout with its verdict, files, artifacts and last events in one transaction. With a lease the attempt is
        settled in the same one, and `LeaseLost` means that nothing was kept. Committing the same rollout again under the
        same lease changes nothing."""
        work = partial(rollouts.commit, rollout=rollout, lease=lease, at=self._clock(), told=told)
        await self._database.write(work)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """A rollout whole: task, verdict, files and trajectory."""
        found = await self._database.read(partial(rollouts.get, rollout_id=rollout_id, files=True))
        return replace(found, trajectory=await self.trajectory(rollout_id))

    async def rollouts(self, run_id: str | None = None, *, trajectories: bool = False) -> AsyncGenerator[Rollout]:
        """All rollouts of a run, or of the store, in the order they were begun, a few in memory at a time; without files."""
        last = ""
        tasks: dict[bytes, Task] = {}
        while True:
            work = partial(rollouts.after, run_id=run_id, last=last, limit=_STREAMED, tasks=tasks)
            found = await self._database.read(work)
            for rollout in found:
                if trajectories:
                    rollout = replace(rollout, trajectory=await self.trajectory(rollout.id))
                yield rollout
            if len(found) < _STREAMED:
                return
            last = found[-1].id

    async def list_rollouts(
        self,
        run_id: str | None = None,
        *,
        task_id: str | None = None,
        agent: str | None = None,
        policy: str | None = None,
        status: str | None = None,
        boundary: str | None = None,
        group_id: str | None = None,
        search: str | None = None,
        sort: SortKey = "started_at",
        descending: bool = False,
        limit: int = 100,
        offset: int = 0,
    ) -> Page:
        """One page of lines, filtered and sorted by the database. `search` is a part of a task id or the start of a
        rollout id."""
        return await self._database.read(
            partial(
                rollouts.page,
                run_id=run_id,
                task_id=task_id,
                agent=agent,
                policy=policy,
                status=status,
                boundary=boundary,
                group_id=group_id,
                search=search,
                sort=sort,
                descending=descending,
                limit=limit,
                offset=offset,
            )
        )

    async def lines(self, run_id: str) -> list[RolloutRow]:
        """Every rollout of a run as the line a list shows of it: what statistics need, and no bodies."""
        return await self._database.read(partial(rollouts.lines, run_id=run_id))

    async def failures(self, run_id: str) -> tuple[FailureGroup, ...]:
        """A run's failures by what they say, the most frequent first."""
        return await self._database.read(partial(rollouts.failures, run_id=run_id))

    async def stopped_policies(self, run_id: str) -> dict[str, str]:
        """Policies that the run asks no more, with what their servers said: what is owed waits for the run to be resumed."""
        counts = await self.progress(run_id)
        if not counts.get("owed", 0) or counts.get("leased", 0):
            return {}
        found = await self.events(run_id=run_id, name=POLICY_STOPPED)
        return {stored.event.fields["policy"]: stored.event.fields["message"] for stored in found}

    async def add_verdict(self, rollout_id: str, verdict: Verdict) -> None:
        """Judge a rollout again: this verdict counts from now on, the earlier ones stay listed."""
        work = partial(rollouts.rescore, rollout_id=rollout_id, verdict=verdict, at=self._clock())
        await self._database.write(work)

    async def verdicts(self, rollout_id: str) -> list[StoredVerdict]:
        """Every judgement of a rollout, oldest first."""
        return await self._database.read(partial(rollouts.verdicts_of, rollout_id=rollout_id))

    # events

    async def event(self, *new: Event) -> None:
        """Append what happened, as it happens."""
        if new:
            await self._database.write(partial(events.append, new=list(new)))

    async def events_under(self, told: Sequence[tuple[Lease, Event]]) -> None:
        """Append what happened under claims; of a claim that was lost, nothing."""
        if told:
            await self._database.write(partial(events.append_held, told=told))

    async def latest_event(self) -> int:
        """The number of the newest event; 0 when there is none."""
        return await self._database.read(events.latest)

    async def events(
        self,
        *,
        run_id: str | None = None,
        rollout_id: str | None = None,
        name: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[StoredEvent]:
        """Events past number `after`, in order."""
        work = partial(events.after, seq=after, run_id=run_id, rollout_id=rollout_id, name=name, limit=limit)
        return await self._database.read(work)

    async def recent_events(self, run_id: str, *, limit: int = 1000) -> list[StoredEvent]:
        """The last events of a run, newest first."""
        return await self._database.read(partial(events.recent, run_id=run_id, limit=limit))

    async def watch(
        self, *, run_id: str | None = None, rollout_id: str | None = None, after: int = 0, every_s: float = 0.25
    ) -> AsyncGenerator[StoredEvent]:
        """Events past number `after` for as long as the caller listens, from this process or any other."""
        while True:
            found = await self.events(run_id=run_id, rollout_id=rollout_id, after=after)
            for stored in found:
                yield stored
                after = stored.seq
            if not found:
                await asyncio.sleep(every_s)

    # bodies and artifacts

    async def put_blob(self, data: bytes) -> str:
        """Keep a body once; gives the hexadecimal sha256 it is found under."""
        digest = hashlib.sha256(data).digest()
        await self._database.write(partial(blobs.put, bodies={digest: data}))
        return digest.hex()

    async def get_blob(self, digest: str) -> bytes:
        return await self.load_blob(bytes.fromhex(digest))

    async def missing_blobs(self, digests: Sequence[str]) -> set[str]:
        """Those of the bodies that are not kept here."""
        found = await self._database.read(partial(blobs.known, digests=[bytes.fromhex(d) for d in digests]))
        return {digest for digest in digests if bytes.fromhex(digest) not in found}

    async def add_artifacts(self, rollout_id: str, files: Mapping[str, bytes]) -> None:
        """Keep more files with a rollout."""
        await self._database.write(partial(rollouts.put_files, rollout_id=rollout_id, files=files, collected=False))

    async def artifacts(self, rollout_id: str) -> list[ArtifactInfo]:
        return await self._database.read(partial(rollouts.artifacts_of, rollout_id=rollout_id))

    # housekeeping

    async def resolve(self, text: str) -> tuple[str, str]:
        """A run or rollout by its id or the unique start of one: `("run" | "rollout", id)`."""
        return await self._database.read(partial(clean.resolve, text=text))

    async def delete_run(self, run_id: str) -> int:
        """Remove a run with all its rollouts; gives how many those were. Bodies go with `sweep`."""
        return await self._database.write(partial(clean.delete_run, run_id=run_id))

    async def sweep(self) -> int:
        """Remove bodies that nothing refers to; gives how many. Refused while leases or sessions are open, since a body
        may be kept a moment before what refers to it."""
        return await self._database.write(partial(clean.sweep, now=self._clock()))

    async def backup(self, target: Path) -> None:
        """A consistent copy of the whole store in one new file, while it is in use (SQLite)."""
        await self._database.backup(target)

    @staticmethod
    async def restore(backup: Path, target: Path) -> None:
        """Put a backup where a store is to be, once it is proved whole; never over one that is there."""
        await asyncio.to_thread(restore, backup, target)


def _database(
    where: str, synchronous: Synchronous, *, create: bool = True, private: bool = False, wait_s: float = 10.0
) -> Database:
    scheme, separator, rest = where.partition("://")
    if not separator or scheme == "sqlite":
        path = Path(rest.removeprefix("/") if separator else where)
        if not path.name or path.name == ":memory:":
            raise ConfigError("a store needs a file", hint="give a path such as runs.db")
        check_place(path, create=create)
        if path.exists():
            keep_private(path, required=private)
        return SQLite(path, synchronous=synchronous)
    if scheme in ("postgresql", "postgres"):
        from rollyard.store.postgres import PostgresDatabase

        return PostgresDatabase(where, wait_s=wait_s)
    if scheme in ("redis", "rediss"):
        raise ConfigError(
            "runs, rollouts and calls need SQL, and Redis is not",
            hint="give a path or postgresql://...; only `rollyard serve plane` takes redis://",
        )
    raise ConfigError(f"no store at {scheme}://", hint="give a path, sqlite:///path or postgresql://...")
