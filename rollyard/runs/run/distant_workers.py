"""Workers in processes of their own, as their driver sees them: finished rollouts are read from the store, where workers put
them, and a worker that died is started again.

A run is given up only when none of its places can hold a worker: at each it ended with an error that another try would meet
again, or at once, again and again, while no rollout was committed. So one machine that is broken, or dead and not yet known to
be, does not end a run, and a setting that no worker can work with does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

import anyio

from rollyard.core.errors import ConfigError, Error
from rollyard.core.events import COMMITTED
from rollyard.core.log import Log
from rollyard.core.rollout import Rollout
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.distant_worker import WorkerEnd
from rollyard.runs.run.executor import RunResources
from rollyard.runs.run.store_retry import repeat_until_done
from rollyard.store.values import StoredEvent

_POLL_S = 0.25  # between looks at the store
_AT_ONCE = 200  # events whose rollouts are in memory together; one rollout tells about twenty
_SHORT_S = 15.0  # a worker that lived less counts as one that cannot start
_TRIES = 5
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 60.0  # before a worker that died is started again; doubled after `_TRIES`


class DistantWorkers(ABC):
    """What `Workers` asks, for a class that starts them and says when all of them have `ended`."""

    def __init__(self, work: Assignment, given: RunResources) -> None:
        self._work, self._given = work, given
        self._run_id = work.run_id
        self._log = Log("rollyard.runs.workers")
        self._places: set[str] = set()  # where a worker should be, by the workers' names
        self._since: dict[str, float] = {}  # when the one that is there was started
        self._short: dict[str, int] = {}  # how often in a row it ended at once there
        self._gave_up: set[str] = set()  # where another try would meet the same error
        self.broken: Error | None = None  # why the run is given up
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
        self._after = await repeat_until_done(self._given.store.latest_event)

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        store, sink = self._given.store, self._given.sink
        last = False
        while not self._cancelled:
            found = await repeat_until_done(lambda: store.events(run_id=self._run_id, after=self._after))
            for start in range(0, len(found), _AT_ONCE):
                some = found[start : start + _AT_ONCE]
                done = await self._read_committed(some)
                for stored in some:
                    self._after = stored.seq
                    await sink(stored.event)
                    if (rollout := done.get(stored.seq)) is not None:
                        self._short.clear()  # there are workers that work
                        yield rollout
            if found:
                continue
            if self.broken is not None:
                raise self.broken
            if last and not await repeat_until_done(lambda: store.has_more_events(self._run_id, after=self._after)):
                return
            last = last or await self._over()
            if not last:
                await anyio.sleep(_POLL_S)

    async def _read_committed(self, found: Sequence[StoredEvent]) -> dict[int, Rollout]:
        """The rollouts of those events that say that one was committed, by the event's number. They are read side by side:
        one after the other, a driver would be slower than a hundred workers."""
        done: dict[int, Rollout] = {}

        async def read(seq: int, rollout_id: str) -> None:
            done[seq] = await repeat_until_done(lambda: self._given.store.get_rollout(rollout_id))

        async with anyio.create_task_group() as group:
            for stored in found:
                if stored.event.name == COMMITTED and stored.event.rollout_id is not None:
                    group.start_soon(read, stored.seq, stored.event.rollout_id)
        return done

    async def cancel(self) -> None:
        self._cancelled = True
        await self.dismiss()

    async def _over(self) -> bool:
        if self._work.stays:
            return False
        counts = await repeat_until_done(lambda: self._given.store.progress(self._run_id))
        return (not counts.get("owed", 0) and not counts.get("leased", 0)) or self.ended

    def note_start(self, name: str) -> None:
        self._places.add(name)
        self._since[name] = time.monotonic()

    def note_end(self, name: str, ended: WorkerEnd) -> bool:
        """Whether it ended for good. What another try may not meet again is as if it had died."""
        if ended.error is None:
            return True
        if ended.retry not in ("configuration", "never"):
            self.note_death(name, ended.error, hint=ended.hint)
            return False
        self._gave_up.add(name)
        self._log.warning("worker.gave_up", worker=name, error=ended.error)
        kind = ConfigError if ended.retry == "configuration" else Error
        self._end_if_hopeless(kind(f"a worker gave up: {ended.error}", hint=ended.hint))
        return True

    def note_death(self, name: str, reason: str, *, hint: str | None = None) -> None:
        lived_s = time.monotonic() - self._since.pop(name)
        self._log.warning("worker.lost", worker=name, lived_s=round(lived_s, 1), error=reason)
        self._short[name] = self._short.get(name, 0) + 1 if lived_s < _SHORT_S else 0
        count = "the worker" if len(self._places) == 1 else f"each of {len(self._places)} workers"
        message = (
            f"{count} ended {_TRIES} times in a row within {_SHORT_S:.0f} s, and no rollout was committed meanwhile"
        )
        self._end_if_hopeless(Error(f"{message}; the last one: {reason}", hint=hint))

    def _end_if_hopeless(self, error: Error) -> None:
        if all(self._has_failed(place) for place in self._places):
            self.broken = error

    def _has_failed(self, name: str) -> bool:
        began = self._since.get(name)
        lives_on = began is not None and time.monotonic() - began >= _SHORT_S
        return name in self._gave_up or (self._short.get(name, 0) >= _TRIES and not lives_on)

    def pause_s(self, name: str) -> float:
        """Before another one is started there."""
        return min(_AGAIN_S * 2 ** max(0, self._short.get(name, 0) - _TRIES + 1), _LONGEST_AGAIN_S)
