"""`Sessions`: which environments exist, who may have another, and when one is over.

A session that a client holds is never reaped: only one that no client is attached to, that runs nothing, and whose lease ran
out. A client that comes at capacity waits in line for as long as it said. What a killed server left in the journal is put back
when it is asked for, not before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Self

import msgspec

from rollyard.core.ids import new_id
from rollyard.envs.env import Env
from rollyard.envs.journal import JournalRecord, SessionJournal
from rollyard.envs.metrics import EnvCounters
from rollyard.envs.results import EnvRefused
from rollyard.envs.session import CLOSE_S, EnvSession, SessionObserver, SessionTerms, digest
from rollyard.envs.telemetry import Telemetry


class EnvLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lease_s`: how long a session lives with no client attached; `deadline_s`: of one move. Clients may ask for other values
    up to the `max_` ones. `reap_s`: how often abandoned ones are looked for."""

    capacity: int = 64
    lease_s: float = 60.0
    max_lease_s: float = 3600.0
    deadline_s: float = 600.0
    max_deadline_s: float = 7200.0
    max_queue_s: float = 600.0
    heartbeat_s: float = 10.0
    reap_s: float = 1.0


class Sessions:
    def __init__(
        self,
        make: Callable[[], Env],
        limits: EnvLimits,
        *,
        name: str = "env",
        gym: bool = True,
        journal: SessionJournal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.gym = gym
        self.waiting = 0
        self.counters = EnvCounters()
        self.telemetry = Telemetry(name=name)
        self._watch = SessionObserver(counters=self.counters, telemetry=self.telemetry, journal=journal)
        self._make = make
        self._journal = journal
        self._clock = clock
        self._left: dict[str, JournalRecord] = {}
        self._by_id: dict[str, EnvSession] = {}
        self._by_agent: dict[str, EnvSession] = {}
        self._slots = asyncio.Semaphore(limits.capacity)
        self._restoring = asyncio.Lock()
        self._reaper: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if self._journal is not None:
            self._left = {record.session: record for record in self._journal.list_left()}
        self._reaper = asyncio.get_running_loop().create_task(self._reap())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        await asyncio.gather(*(self.close(s, leave=True) for s in list(self._by_id.values())), *self._abandoned)

    @property
    def active(self) -> list[EnvSession]:
        return list(self._by_id.values())

    async def open(
        self, *, lease_s: float | None = None, deadline_s: float | None = None, queue_s: float = 0.0
    ) -> EnvSession:
        """Its `lease` and `agent_key` are for the client that opened it."""
        limits = self.limits
        terms = SessionTerms(
            lease_s=min(limits.lease_s if lease_s is None else lease_s, limits.max_lease_s),
            deadline_s=min(limits.deadline_s if deadline_s is None else deadline_s, limits.max_deadline_s),
            gym=self.gym,
        )
        return await self._begin(terms, min(queue_s, limits.max_queue_s))

    async def find(self, session_id: str) -> EnvSession:
        """The session of that id, put back from the journal if it was a killed server's."""
        if session_id in self._left:
            async with self._restoring:
                if (record := self._left.get(session_id)) is not None:
                    return await self._restore(record)
        session = self._by_id.get(session_id)
        if session is None:
            raise EnvRefused("SESSION_ERROR", "there is no such session")
        return session

    async def of_agent(self, key: str) -> EnvSession | None:
        if not key:
            return None
        hashed = digest(key)
        if self._left:
            for record in list(self._left.values()):
                if record.agent == hashed:
                    return await self.find(record.session)
        return self._by_agent.get(hashed)

    async def close(self, session: EnvSession, *, change: str = "closed", leave: bool = False) -> None:
        """`leave` what is kept of it, for a server that comes after this one."""
        if self._by_id.pop(session.id, None) is None:
            return
        self._by_agent.pop(session.agent_hash, None)
        try:
            await session.aclose(leave=leave)
        finally:
            self._slots.release()
            self._change(change, session)

    def attach(self, session: EnvSession) -> None:
        session.attached += 1
        self._change("attached", session)

    def detach(self, session: EnvSession) -> None:
        session.attached -= 1
        session.touch()
        self._change("detached", session)

    async def _begin(self, terms: SessionTerms, queue_s: float, left: JournalRecord | None = None) -> EnvSession:
        await self._slot(queue_s)
        env: Env | None = None
        try:
            env = self._make()
            async with asyncio.timeout(terms.deadline_s):
                await env.prepare()
            session = EnvSession(env, terms, self._watch, left=left, clock=self._clock)
            if left is not None:
                await session.restore(left.saved)
        except BaseException as error:  # cancelled or the author's bug: the slot is free again either way
            self._slots.release()
            if env is not None:
                self._abandon(env)
            if not isinstance(error, Exception):
                raise
            incident = new_id("err")
            self.telemetry.fail("env.session.refused", error, incident=incident)
            raise EnvRefused("FACTORY_ERROR", f"the environment could not be made ({incident})") from error
        self._by_id[session.id] = session
        self._by_agent[session.agent_hash] = session
        self._change("opened" if left is None else "restored", session)
        return session

    def _abandon(self, env: Env) -> None:
        """Close one that became no session, without keeping the caller waiting."""

        async def close() -> None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await env.close()
            except Exception as error:  # noqa: BLE001 - author's code
                self.telemetry.fail("env.session.closed", error)

        task = asyncio.get_running_loop().create_task(close())
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _restore(self, record: JournalRecord) -> EnvSession:
        terms = SessionTerms(lease_s=record.lease_s, deadline_s=record.deadline_s, gym=self.gym)
        try:
            session = await self._begin(terms, 0.0, left=record)
        except EnvRefused as error:
            if error.code == "FACTORY_ERROR":
                self._forget(record)
                raise EnvRefused("SESSION_ERROR", "the session could not be put back") from error
            raise
        del self._left[record.session]
        return session

    def _forget(self, record: JournalRecord) -> None:
        del self._left[record.session]
        if self._journal is not None:
            self._journal.drop(record.session)

    def _change(self, change: str, session: EnvSession) -> None:
        self.counters.sessions[change] += 1
        self.telemetry.say(f"env.session.{change}", session=session.id, sessions=len(self._by_id))

    async def _slot(self, queue_s: float) -> None:
        if queue_s <= 0 and self._slots.locked():
            raise self._full()
        self.waiting += 1
        try:
            async with asyncio.timeout(queue_s if queue_s > 0 else None):
                await self._slots.acquire()
        except TimeoutError as error:
            raise self._full() from error
        finally:
            self.waiting -= 1

    def _full(self) -> EnvRefused:
        self.counters.sessions["refused"] += 1
        self.telemetry.say("env.session.refused", sessions=len(self._by_id))
        return EnvRefused("CAPACITY_REACHED", f"all {self.limits.capacity} environments are in use")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self.limits.reap_s)
            for session in self.active:
                if session.expired:
                    await self.close(session, change="expired")
            for record in list(self._left.values()):
                if self._journal is not None and self._journal.is_expired(record) and not self._restoring.locked():
                    self._forget(record)
