"""Writes gathered into batches. When little happens each goes at once, and also when one comes alone after another was answered.
When several callers write, one waits for others, since a transaction of one costs several times as much as a place in one of
sixteen: until none has come for `QUIET_S`, at most `GATHER_S`, and one that has `gather_s` at least so long. That no other comes
says that all callers wait already; a fixed time would be most of what a call takes where they are few.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rollyard.core.errors import StoreError
from rollyard.store.database import Work

T = TypeVar("T")

DEADLINE_S = 60.0
GATHER_S, QUIET_S = 0.006, 0.001
SLOW_S = 0.001  # a `gather_s` from which on a write that comes alone waits too: its caller took long anyway
MOST_S, MOST_DISTANT_S = 0.03, 0.1  # that count of a `gather_s`
BUSY_S = 0.02  # batches that follow each other faster than this are load


class WaitingWork(NamedTuple):
    work: Work[Any]
    future: asyncio.Future[Any]


def resolve(works: Sequence[WaitingWork], results: Sequence[Any]) -> None:
    """In their loop. A result that is an exception is raised for its caller."""
    for waiting, result in zip(works, results, strict=True):
        future = waiting.future
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


class Batch:
    """What one loop hands in together; its one timer is the deadline of all in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.works: list[WaitingWork] = []
        self.timer: asyncio.TimerHandle | None = None
        self.earliest = self.latest = math.inf  # when it is handed in, by the loop's clock
        self.newest = 0.0  # when its last work came
        self.armed = math.inf  # for when the loop looks at it next

    @property
    def due(self) -> float:
        return max(self.earliest, min(self.latest, self.newest + QUIET_S))

    def resolve(self, results: Sequence[Any]) -> None:
        """In its loop."""
        if self.timer is not None:
            self.timer.cancel()
        resolve(self.works, results)

    def expire(self) -> None:
        late = StoreError(f"the database took no write for {DEADLINE_S:.0f} s", hint="is its disk full?")
        for waiting in self.works:
            if not waiting.future.done():
                waiting.future.set_exception(late)


class Batches:
    """`take` is given each batch when it is complete, in its loop. A `distant` database is one that other machines write to as
    well: how busy it is cannot be seen from here, so a write that may wait does, and longer; and `take` sees to deadlines."""

    def __init__(self, take: Callable[[Batch], None], *, distant: bool = False) -> None:
        self._take, self._distant = take, distant
        self._gathering: dict[asyncio.AbstractEventLoop, Batch] = {}
        self._handed_at = -math.inf
        self._alone: asyncio.Future[Any] | None = None  # of the last work, where it went by itself

    async def write(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        batch = self._gathering.get(loop)
        if batch is None:
            batch = self._gathering[loop] = Batch(loop)
        now = batch.newest = loop.time()
        least = min(getattr(work, "gather_s", 0.0), MOST_DISTANT_S if self._distant else MOST_S)
        busy = self._distant or now - self._handed_at < BUSY_S
        if busy and (least >= SLOW_S or self._alone is None or not self._alone.done()):
            batch.earliest = min(batch.earliest, now + least)
            batch.latest = min(batch.latest, now + max(GATHER_S, least))
        else:
            batch.earliest = batch.latest = now
        if batch.due < batch.armed:
            self._look_again(batch)
        batch.works.append(WaitingWork(work, future))
        return await future

    def flush(self) -> None:
        """Nothing is gathered any more."""
        for batch in list(self._gathering.values()):
            self._hand_in(batch)

    def _look_again(self, batch: Batch) -> None:
        batch.armed = batch.due
        batch.loop.call_at(batch.armed, self._look, batch, batch.armed)

    def _look(self, batch: Batch, armed: float) -> None:
        if armed != batch.armed or self._gathering.get(batch.loop) is not batch:
            return  # it was handed in, or is looked at earlier
        if batch.due > armed:  # another work came meanwhile
            self._look_again(batch)
        else:
            self._hand_in(batch)

    def _hand_in(self, batch: Batch) -> None:
        if self._gathering.get(batch.loop) is batch:
            del self._gathering[batch.loop]
            self._handed_at = batch.loop.time()
            self._alone = batch.works[0].future if len(batch.works) == 1 else None
            if not self._distant:
                batch.timer = batch.loop.call_later(DEADLINE_S, batch.expire)
            self._take(batch)
