"""Writes gathered into batches: those of one turn of the loop when little happens, those of `GATHER_S` or of their own `gather_s`
when much does, since a transaction of one costs more than twice as much per call as one of sixteen."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rollyard.core.errors import StoreError
from rollyard.store.database import Work

T = TypeVar("T")

DEADLINE_S = 60.0
GATHER_S = 0.006  # under load: a few milliseconds of waiting for half the cost
BUSY_S = 0.02  # batches that follow each other faster than this are load


class WaitingWork(NamedTuple):
    work: Work[Any]
    future: asyncio.Future[Any]


class Batch:
    """What one loop hands in together; its one timer is the deadline of all in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.works: list[WaitingWork] = []
        self.timer: asyncio.TimerHandle | None = None
        self.due = math.inf  # when it is handed in, by the loop's clock

    def resolve(self, results: Sequence[Any]) -> None:
        """In its loop. A result that is an exception is raised for its caller."""
        if self.timer is not None:
            self.timer.cancel()
        for waiting, result in zip(self.works, results, strict=True):
            future = waiting.future
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def expire(self) -> None:
        late = StoreError(f"the database took no write for {DEADLINE_S:.0f} s", hint="is its disk full?")
        for waiting in self.works:
            if not waiting.future.done():
                waiting.future.set_exception(late)


class Batches:
    """`take` is given each batch when it is complete, in its loop."""

    def __init__(self, take: Callable[[Batch], None]) -> None:
        self._take = take
        self._gathering: dict[asyncio.AbstractEventLoop, Batch] = {}
        self._handed_at = 0.0

    async def write(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        batch = self._gathering.get(loop)
        if batch is None:
            batch = self._gathering[loop] = Batch(loop)
        now = loop.time()
        due = now + max(GATHER_S, getattr(work, "gather_s", 0.0)) if now - self._handed_at < BUSY_S else now
        if due < batch.due:
            batch.due = due
            loop.call_at(due, self._hand_in, batch)
        batch.works.append(WaitingWork(work, future))
        return await future

    def flush(self) -> None:
        """Nothing is gathered any more."""
        for batch in list(self._gathering.values()):
            self._hand_in(batch)

    def _hand_in(self, batch: Batch) -> None:
        if self._gathering.get(batch.loop) is batch:
            del self._gathering[batch.loop]
            self._handed_at = batch.loop.time()
            batch.timer = batch.loop.call_later(DEADLINE_S, batch.expire)
            self._take(batch)
