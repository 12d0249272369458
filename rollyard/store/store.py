"""`Store`: the durable record of runs, rollouts, calls, events and bodies.

    async with Store.open("runs.db") as store: ...

Each method is one transaction or one consistent read. A method that writes returns once the write would survive SIGKILL. Most
are `reads(...)` or `writes(...)` of a function beside its tables, which says what the method does.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from rollyard.core.call import CallRecord
from rollyard.core.delta import Blob, apply
from rollyard.core.errors import ConfigError
from rollyard.core.events import POLICY_STOPPED, Event
from rollyard.core.lease import Attempt, Lease
from rollyard.core.node import Node
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.store import blobs as _blobs
from rollyard.store import calls as _calls
from rollyard.store import clean as _clean
from rollyard.store import events as _events
from rollyard.store import jobs as _jobs
from rollyard.store import leases as _leases
from rollyard.store import notes as _notes
from rollyard.store import rollouts as _rollouts
from rollyard.store import runs as _runs
from rollyard.store import sweep as _sweep
from rollyard.store import texts as _texts
from rollyard.store.call_rows import follow_differences
from rollyard.store.data_frames import RolloutList
from rollyard.store.database import Database, SmallOperation
from rollyard.store.event_order import EventOrder
from rollyard.store.methods import Records, reads, writes, writes_at, writes_lease
from rollyard.store.migrate import prepare
from rollyard.store.sqlite import SQLite
from rollyard.store.sqlite_file import check_place, is_foreign, keep_private, restore
from rollyard.store.sqlite_writer import Synchronous
from rollyard.store.values import StoredEvent
from rollyard.trajectory.trajectory import Trajectory

_STREAMED = 64  # rollouts read at first while streaming; and calls read at once, where these are read too
_LONGEST_READ, _READ_CHARACTERS = 256, 1_000_000  # later as many as have about so many characters


class Store(Records):
    """Made by `Store.open`. It is a `CallLog` for the gate."""

    def __init__(self, database: Database, clock: Callable[[], float] | None, where: str) -> None:
        super().__init__(database, clock)
        self.where = where
        self._order = EventOrder(database) if self.shared else None

    @property
    def shared(self) -> bool:
        """Whether processes on other machines can open it too."""
        return self.database.kind != "sqlite"

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
        writer: socket.socket | None = None,
    ) -> AsyncGenerator[Store]:
        """`where` is a path, `sqlite:///path` or `postgresql://user@host/name`. A new database is set up, with `create=False`
        refused; an older one is brought up to date; a newer one is refused. A new file appears with the first write. `private`
        refuses a file that other users can read. `wait_s` is how long the first
        connection to PostgreSQL is tried. `clock` decides when leases run out; without one this machine's does, and on PostgreSQL
        the server's. `writer` leads to the process that writes to this file for several (`serve_writes`)."""
        database = open_database(str(where), synchronous, create=create, private=private, wait_s=wait_s, writer=writer)
        try:
            await prepare(database, create=create)
            place = database.path if isinstance(database, SQLite) else where  # this process may go to another folder
            yield cls(database, clock, str(place))
        finally:
            await database.aclose()

    # calls: what the gate needs

    async def commit(self, record: CallRecord, nodes: Sequence[Node], blobs: Mapping[bytes, Blob]) -> None:
        await self.database.write(_calls.CommitCall(record, nodes, blobs))

    save_session = writes(_calls.save_session, small=True)
    close_session = writes(_calls.close_session, small=True)
    session = reads(_calls.session)
    sessions = reads(_calls.all_sessions)
    load_calls = reads(_calls.load)
    load_own_bodies = reads(_calls.load_own_bodies)

    async def load_blob(self, digest: bytes, rollout_id: str, own: Mapping[bytes, Blob] | None = None) -> bytes:
        """A body that calls of the rollout name. A caller that reads many gives the rollout's `load_own_bodies`: otherwise each
        is sought in every call."""
        start, differences = follow_differences(own or {}, digest)
        whole = own.get(start) if own is not None else None
        if not isinstance(whole, bytes):
            whole = await self.database.read(partial(_calls.load_body, digest=start, rollout_id=rollout_id))
        for difference in differences:
            whole = apply(difference, whole)
        return whole

    async def trajectory(self, rollout_id: str) -> Trajectory:
        """The graph of a rollout's calls, as it was when the last of them was committed."""
        return Trajectory.restore(rollout_id, *await self.load_calls(rollout_id))

    # runs and the leases under which their attempts are done

    create_run = writes_at(_runs.create)
    get_run = reads(_runs.get)
    has_run = reads(_runs.has)
    list_runs = reads(_runs.list_runs)

    async def add_attempts(self, run_id: str, attempts: Iterable[Attempt]) -> None:
        """What the run owes, handed out in this order. An attempt that is there already is left alone."""
        await self.database.write(partial(_runs.add_attempts, run_id=run_id, new=list(attempts)))

    attempts = reads(_runs.attempts_of)
    progress = reads(_runs.progress)
    claim = writes_lease(_leases.claim)
    pause = writes_lease(_leases.pause)
    heartbeat = writes_lease(_leases.renew)
    _renew_all = writes_lease(_leases.renew_all)

    async def heartbeats(self, held: Sequence[Lease], *, ttl_s: float) -> set[str]:
        """`heartbeat` for all leases of a worker at once; gives the ids of attempts whose leases were lost."""
        return await self._renew_all(held, ttl_s=ttl_s) if held else set()

    reclaim = writes_lease(_leases.reclaim)
    release = writes_lease(_leases.give_back, small=True)

    async def expire(self, lease: Lease) -> bool:
        """End the lease of an owner that is known to be dead, before its time is up."""
        return await self.release(lease)

    withdraw = writes(_leases.withdraw)
    leases = reads(_leases.list_leases)
    live_attempt = reads(_leases.find_live)
    spent = reads(_rollouts.count_tokens)

    # runs that a server was asked for

    add_job = writes(_jobs.add)
    get_job = reads(_jobs.get)
    jobs = reads(_jobs.list_jobs)
    count_open_jobs = reads(_jobs.count_open)
    move_job = writes_at(_jobs.move)

    # rollouts

    commit_rollout = writes_at(_rollouts.commit, small=True)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """A rollout whole: task, verdict, files and trajectory."""
        found = await self.database.read(partial(_rollouts.get, rollout_id=rollout_id))
        return replace(found, trajectory=await self.trajectory(rollout_id))

    async def rollouts(self, run_id: str | None = None, *, trajectories: bool = False) -> AsyncGenerator[Rollout]:
        """All rollouts of a run, or of the store, in the order they were begun, a few in memory at a time; without files."""
        last, limit = "", _STREAMED
        tasks: dict[bytes, Task] = {}
        while True:
            work = partial(_rollouts.after, run_id=run_id, last=last, limit=limit, tasks=tasks)
            found, size = await self.database.read(work)
            if trajectories:
                async for rollout in self._with_calls(found):
                    yield rollout
            else:
                for rollout in found:
                    yield rollout
            if len(found) < limit:
                return
            last = found[-1].id
            limit = max(1, min(2 * limit, _LONGEST_READ, len(found) * _READ_CHARACTERS // max(1, size)))

    async def _with_calls(self, found: Sequence[Rollout]) -> AsyncGenerator[Rollout]:
        """With their trajectories: those of a few small ones come with one read, a large one alone."""
        waiting, calls = list[Rollout](), 0
        for number, rollout in enumerate(found, start=1):
            waiting.append(rollout)
            calls += 1 + rollout.calls
            if calls < _STREAMED and number < len(found):
                continue
            ids = [rollout.id for rollout in waiting]
            loaded = await self.database.read(partial(_calls.load_several, rollout_ids=ids))
            for one, of_one in zip(waiting, loaded, strict=True):
                yield replace(one, trajectory=Trajectory.restore(one.id, *of_one))
            waiting, calls = [], 0

    async def all_rollouts(self, run_id: str) -> RolloutList:
        """All rollouts of a run at once, without files and calls: a list that is a data frame too."""
        return RolloutList([rollout async for rollout in self.rollouts(run_id)])

    list_rollouts = reads(_rollouts.page)
    lines = reads(_rollouts.lines)
    failures = reads(_rollouts.failures)

    async def stopped_policies(self, run_id: str) -> dict[str, str]:
        """Policies that the run asks no more, with what their servers said: what is owed waits for the run to be resumed."""
        counts = await self.progress(run_id)
        if not counts.get("owed", 0) or counts.get("leased", 0):
            return {}
        found = await self.events(run_id=run_id, name=POLICY_STOPPED)
        return {stored.event.fields["policy"]: stored.event.fields["message"] for stored in found}

    # what people say, and what is found by words

    add_note = writes_at(_notes.add)
    remove_note = writes(_notes.remove)
    notes = reads(_notes.of_rollouts)
    find_labelled = reads(_notes.find_labelled)
    find_noted = reads(_notes.find_noted)
    find_texts = reads(_texts.find)
    rollouts_with = reads(_texts.candidates)
    missing_texts = reads(_texts.list_missing)

    add_verdict = writes_at(_rollouts.rescore)
    verdicts = reads(_rollouts.verdicts_of)

    # events

    async def event(self, *new: Event) -> None:
        """Append what happened, as it happens."""
        if new:
            await self.database.write(SmallOperation(_events.append, list(new)))

    async def events_under(self, events: Sequence[tuple[Lease, Event]]) -> None:
        """Append what happened under claims; of a claim that was lost, nothing."""
        if events:
            await self.database.write(SmallOperation(_events.append_held, events))

    async def latest_event(self) -> int:
        """The number of the newest event, to go on from; 0 when there is none."""
        return await (self.database.read(_events.latest) if self._order is None else self._order.latest())

    async def events(
        self,
        *,
        run_id: str | None = None,
        rollout_id: str | None = None,
        name: str | None = None,
        after: int | None = None,
        limit: int = 1000,
    ) -> list[StoredEvent]:
        """Events in order: those there are, or with `after` those past that number. A reader that goes on from the last number
        it was given misses none and sees none twice; on PostgreSQL it is given an event once all that were numbered before it
        are there too."""
        find = partial(_events.list_between, run_id=run_id, rollout_id=rollout_id, name=name, limit=limit)
        if after is None or self._order is None:
            return await self.database.read(partial(find, after=after or 0))
        return await self._order.follow(find, after)

    has_more_events = reads(_events.has_more)
    recent_events = reads(_events.recent)

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
        await self.database.write(partial(_blobs.put, bodies={digest: data}))
        return digest.hex()

    async def get_blob(self, digest: str) -> bytes:
        return await self.database.read(partial(_blobs.get, digest=bytes.fromhex(digest)))

    async def missing_blobs(self, digests: Sequence[str]) -> set[str]:
        """The digests among these whose bodies are not kept here."""
        found = await self.database.read(partial(_blobs.find_known, digests=[bytes.fromhex(d) for d in digests]))
        return {digest for digest in digests if bytes.fromhex(digest) not in found}

    add_artifacts = writes(_rollouts.add_artifacts)
    artifacts = reads(_rollouts.artifacts_of)

    # housekeeping

    resolve = reads(_clean.resolve)
    _delete_rollouts = writes(_clean.delete_rollouts)
    _delete_run = writes(_clean.delete_run)

    async def delete_run(self, run_id: str, *, at_once: int = 200) -> int:
        """Remove a run with all its rollouts; gives how many those were. Bodies go with `sweep`. A transaction takes no more
        than `at_once`, so that others need not wait for all of them; broken off, it may be repeated."""
        gone = 0
        while some := await self._delete_rollouts(run_id, limit=at_once):
            gone += some
        return gone + await self._delete_run(run_id)

    async def sweep(self) -> int:
        """Remove bodies that nothing refers to; gives how many. Refused while leases or sessions are open."""
        return await _sweep.sweep(self.database, self.clock())

    async def backup(self, target: Path) -> None:
        """A consistent copy of the whole store in one new file, while it is in use (SQLite)."""
        await self.database.backup(target)

    @staticmethod
    async def restore(backup: Path, target: Path) -> None:
        """Put a backup where a store is to be, once it is proved whole; never over one that is there."""
        await asyncio.to_thread(restore, backup, target)


def open_database(
    where: str,
    synchronous: Synchronous,
    *,
    create: bool = True,
    private: bool = False,
    wait_s: float = 10.0,
    writer: socket.socket | None = None,
) -> Database:
    scheme, separator, rest = where.partition("://")
    if not separator or scheme == "sqlite":
        path = Path(rest.removeprefix("/") if separator else where)
        if not path.name or path.name == ":memory:":
            raise ConfigError("a store needs a file", hint="give a path such as runs.db")
        check_place(path, create=create)
        if path.exists() and not is_foreign(path, create=create):
            keep_private(path, required=private)
        return SQLite(path, synchronous=synchronous, writer=writer)
    if scheme in ("postgresql", "postgres"):
        from rollyard.store.postgres import PostgresDatabase

        return PostgresDatabase(where, wait_s=wait_s)
    if scheme in ("redis", "rediss"):
        raise ConfigError(
            "runs, rollouts and calls need SQL, and Redis is not",
            hint="give a path or postgresql://...; only `rollyard serve plane` takes redis://",
        )
    raise ConfigError(f"no store at {scheme}://", hint="give a path, sqlite:///path or postgresql://...")
