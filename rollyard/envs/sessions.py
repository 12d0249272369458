"""`Sessions`: which environments exist, who may have another, and when one is over.

A session that somebody holds is never reaped: only one that nobody is attached to, that runs nothing, and whose lease ran
out. Whoever comes at capacity waits in line for as long as they said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from rollyard.core.ids import new_id
from rollyard.envs.env import Env
from rollyard.envs.session import Refused, Session

_log = logging.getLogger("rollyard.envs")
_REAP_S = 1.0


class EnvLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lease_s`: how long a session lives with nobody attached; `deadline_s`: of one move. Clients may ask for other values
    up to the `max_` ones."""

    capacity: int = 64
    lease_s: float = 60.0
    max_lease_s: float = 3600.0
    deadline_s: float = 600.0
    max_deadline_s: float = 7200.0
    max_queue_s: float = 600.0
    heartbeat_s: float = 10.0


class Sessions:
    def __init__(self, make: Callable[[], Env], limits: EnvLimits, *, gym: bool = True) -> None:
        self.limits = limits
        self.gym = gym
        self.opened = 0
        self.waiting = 0
        self._make = make
        self._by_id: dict[str, Session] = {}
        self._by_agent: dict[str, Session] = {}
        self._slots = asyncio.Semaphore(limits.capacity)
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reaper = asyncio.get_running_loop().create_task(self._reap())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        await asyncio.gather(*(self.close(s) for s in list(self._by_id.values())))

    @property
    def active(self) -> list[Session]:
        return list(self._by_id.values())

    async def open(
        self, *, lease_s: float | None = None, deadline_s: float | None = None, queue_s: float = 0.0
    ) -> Session:
        limits = self.limits
        await self._slot(min(queue_s, limits.max_queue_s))
        try:
            session = Session(
                self._make(),
                lease_s=min(limits.lease_s if lease_s is None else lease_s, limits.max_lease_s),
                deadline_s=min(limits.deadline_s if deadline_s is None else deadline_s, limits.max_deadline_s),
                gym=self.gym,
            )
        except Exception as error:  # an environment's own bug: logged, and its slot given back
            self._slots.release()
            incident = new_id("err")
            _log.error("%s an environment could not be made", incident, exc_info=error)
            raise Refused("FACTORY_ERROR", f"the environment could not be made ({incident})") from error
        self.opened += 1
        self._by_id[session.id] = session
        self._by_agent[session.agent_key] = session
        return session

    def get(self, session_id: str) -> Session:
        session = self._by_id.get(session_id)
        if session is None:
            raise Refused("SESSION_ERROR", "there is no such session")
        return session

    def of_agent(self, key: str) -> Session | None:
        return self._by_agent.get(key)

    async def close(self, session: Session) -> None:
        if self._by_id.pop(session.id, None) is None:
            return
        self._by_agent.pop(session.agent_key, None)
        try:
            await session.aclose()
        finally:
            self._slots.release()

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

    def _full(self) -> Refused:
        return Refused("CAPACITY_REACHED", f"all {self.limits.capacity} environments are in use")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            for session in self.active:
                if session.expired:
                    _log.info("session=%s lease ran out", session.id)
                    await self.close(session)
