"""Small writes of one process that come at the same time share a transaction: on PostgreSQL beginning, marking and committing one
costs the server several times as much as a row does, and the server is what many workers share.

At most `UNDER_WAY` such transactions run at a time, and what comes meanwhile goes with the next one. So the slower the server is,
the more share one. When one of them fails, or waits for what another process has locked, each gets a transaction of its own: only
the failing ones fail, and only the waiting ones wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollyard.store.batches import Batch, Batches, WaitingWork, resolve
from rollyard.store.database import Work, prepare

T = TypeVar("T")

UNDER_WAY = 2  # so that one which waits for a lock does not keep all others waiting
GROUP = 512  # the most writes in one transaction


class SharedWrites:
    """`together` writes several in one transaction and gives a result for each, or None when that cannot be done; `alone` writes
    one. Both bound how long they take."""

    def __init__(
        self,
        together: Callable[[Sequence[Work[Any]]], Awaitable[Sequence[Any] | None]],
        alone: Callable[[Work[Any]], Awaitable[Any]],
    ) -> None:
        self._together, self._alone = together, alone
        self._batches = Batches(self._take, distant=True)
        self._waiting: list[WaitingWork] = []
        self._groups: dict[asyncio.Task[None], list[WaitingWork]] = {}
        self._singles: dict[asyncio.Task[None], WaitingWork] = {}

    def write(self, work: Work[T]) -> Coroutine[Any, Any, T]:
        return self._batches.write(work)

    async def aclose(self) -> None:
        """Everything handed in is written first, unless nobody waits for it any more: the server may be away."""
        self._batches.flush()
        while under_way := self._groups | {task: [one] for task, one in self._singles.items()}:
            for task, works in under_way.items():
                if all(waiting.future.done() for waiting in works):
                    task.cancel()
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)

    def _take(self, batch: Batch) -> None:
        self._waiting += batch.works
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._groups) < UNDER_WAY:
            some, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
            if wanted := [waiting for waiting in some if not waiting.future.done()]:
                task = asyncio.ensure_future(self._write(wanted))
                self._groups[task] = wanted
                task.add_done_callback(self._end_group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        self._groups.pop(task)
        self._start()

    async def _write(self, group: list[WaitingWork]) -> None:
        # Those that are done together side by side
        group.sort(key=lambda waiting: not hasattr(waiting.work, "together"))
        works = [waiting.work for waiting in group]
        prepare(works)
        results: Sequence[Any] | None = None
        if len(group) > 1:
            try:
                results = await self._together(works)
            except Exception as error:  # noqa: BLE001 - handed to every caller, who raises it
                results = [error] * len(group)
        if results is not None:
            resolve(group, results)
        elif len(group) == 1:
            await self._write_alone(group[0])
        else:
            for waiting in group:
                task = asyncio.ensure_future(self._write_alone(waiting))
                self._singles[task] = waiting
                task.add_done_callback(self._singles.pop)

    async def _write_alone(self, waiting: WaitingWork) -> None:
        try:
            result = await self._alone(waiting.work)
        except Exception as error:  # noqa: BLE001 - handed to its caller, who raises it
            result = error
        resolve([waiting], [result])
