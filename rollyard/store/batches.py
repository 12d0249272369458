"""Writes gathered into batches, since a transaction of one costs several times as much as a place in one of sixteen.

A batch is handed in once the loop has turned `QUIET_TURNS` times without another write. A busy loop answers many callers in each
turn, so batches grow with the load; an idle one turns in microseconds, so where little happens nothing waits. A write that comes
soon after another one waits for a small share of the time `took_s` that its caller has spent already: for all of it, or for half
of it if another write comes then. That one has woken the loop, which costs as much as the write where the loop sleeps in between.
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
QUIET_TURNS = 2  # an answer that has arrived is a write at the end of the next turn
GATHER_S = 0.006  # the longest that writes which keep coming hold up a batch
BUSY_S = 0.02  # writes that follow each other faster than this are load


class GatherWait(NamedTuple):
    """How long a write waits for others: a share of its `took_s`, and at most so many seconds."""

    share: float
    most_s: float

    def wait_s(self, work: Work[Any]) -> float:
        return min(self.share * getattr(work, "took_s", 0.0), self.most_s)


NEAR, DISTANT = GatherWait(0.05, 0.03), GatherWait(0.05, 0.1)


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
        # by the loop's clock
        self.due = math.inf  # when it is handed in, if no other write comes
        self.half = math.inf  # from when on another write hands it in
        self.look: asyncio.TimerHandle | None = None  # at `due`

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
    well: how busy it is cannot be seen from here, so a write waits whenever it may, and longer; and `take` sees to deadlines."""

    def __init__(self, take: Callable[[Batch], None], *, distant: bool = False) -> None:
        self._take, self._distant = take, distant
        self._gather_wait = DISTANT if distant else NEAR
        self._gathering: dict[asyncio.AbstractEventLoop, Batch] = {}
        self._newest = -math.inf  # when the last write came

    async def write(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        batch = self._gathering.get(loop)
        if batch is None:
            batch = self._gathering[loop] = Batch(loop)
        now = loop.time()
        wait_s = self._gather_wait.wait_s(work) if self._distant or now - self._newest < BUSY_S else 0.0
        self._newest = now
        due = now if now >= batch.half else now + wait_s
        batch.half = min(batch.half, now + wait_s / 2)
        if due < batch.due:
            if batch.look is not None:
                batch.look.cancel()
            batch.due, batch.look = due, loop.call_at(due, self._look, batch, due, 0, 0)
        batch.works.append(WaitingWork(work, future))
        return await future

    def flush(self) -> None:
        """Nothing is gathered any more."""
        for batch in list(self._gathering.values()):
            self._hand_in(batch)

    def _look(self, batch: Batch, due: float, seen: int, quiet: int) -> None:
        """Each turn from `due` on; `seen` works were there the last time, as in `quiet` turns before."""
        if due != batch.due or self._gathering.get(batch.loop) is not batch:
            return  # it is due earlier, or was handed in
        quiet = quiet + 1 if len(batch.works) == seen else 0
        if quiet == QUIET_TURNS or batch.loop.time() > due + GATHER_S:
            self._hand_in(batch)
        else:
            batch.loop.call_soon(self._look, batch, due, len(batch.works), quiet)

    def _hand_in(self, batch: Batch) -> None:
        if self._gathering.get(batch.loop) is batch:
            del self._gathering[batch.loop]
            if not self._distant:
                batch.timer = batch.loop.call_later(DEADLINE_S, batch.expire)
            self._take(batch)
