"""Workers in processes of their own, as their driver sees them: finished rollouts are read from the store, where workers put
them, and a worker that died is started again unless it cannot live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import anyio

from rollyard.core.errors import ConfigError, Error, StoreError
from rollyard.core.events import COMMITTED
from rollyard.core.rollout import Rollout
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.distant_worker import WorkerEnd
from rollyard.runs.run.executor import RunResources
from rollyard.runs.run.store_retry import insist

_POLL_S = 0.25  # between looks at the store
_SHORT_S = 15.0  # a worker that lived less counts as one that cannot start
_TRIES = 5


class DistantWorkers(ABC):
    """What `Workers` asks, for a class that starts them and says when all of them have `ended`."""

    def __init__(self, work: Assignment, given: RunResources) -> None:
        self._work, self._given = work, given
        self._run_id = work.run_id
        self._short: dict[str, int] = {}  # how often in a row a worker ended at once
        self._broken: Error | None = None
        self._cancelled = False
        self._after = 0  # the last event that is not news

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Every worker that was started ended by itself: what is left is beyond the run's budget."""

    @abstractmethod
    async def dismiss(self) -> None:
        """Every worker that is left gives its attempts back, removes its sandboxes and ends."""

    async def listen(self) -> None:
        """What happens from now on is news; what an earlier driver has shown is not."""
        self._after = await insist(self._given.store.latest_event)

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        store, sink = self._given.store, self._given.sink
        last = False
        while not self._cancelled:
            found = await insist(lambda: store.events(run_id=self._run_id, after=self._after))
            for stored in found:
                self._after = stored.seq
                await sink(stored.event)
                if stored.event.name == COMMITTED and stored.event.rollout_id is not None:
                    rollout_id = stored.event.rollout_id
                    yield await insist(lambda rollout_id=rollout_id: store.get_rollout(rollout_id))
            if found:
                continue
            if self._broken is not None:
                raise self._broken
            if last and not await insist(lambda: store.has_more_events(self._run_id, after=self._after)):
                return
            last = last or await self._over()
            if not last:
                await anyio.sleep(_POLL_S)

    async def cancel(self) -> None:
        self._cancelled = True
        await self.dismiss()

    async def _over(self) -> bool:
        if self._work.stays:
            return False
        counts = await insist(lambda: self._given.store.progress(self._run_id))
        return (not counts.get("owed", 0) and not counts.get("leased", 0)) or self.ended

    def _note_end(self, ended: WorkerEnd) -> None:
        if ended.error is not None:
            kind = StoreError if ended.boundary == "store" else ConfigError
            self._broken = kind(f"a worker gave up: {ended.error}", hint=ended.hint)

    def _note_death(self, name: str, where: str, lived_s: float, reason: str) -> None:
        """One that dies at once, again and again, ends the run; any other is started anew."""
        self._short[name] = self._short.get(name, 0) + 1 if lived_s < _SHORT_S else 0
        if self._short[name] >= _TRIES:
            self._broken = Error(f"the worker {where} ended {_TRIES} times at once: {reason}")
