"""Work that goes on while a blocking caller does other things: a trainer's thread on one side, the event loop on the other.

It runs on the loop of `rollyard.sync`. `end` waits for the clean-up of what it cancels, so that no sandbox outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from rollyard import sync

T = TypeVar("T")


class BackgroundWork(Generic[T]):
    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.task: asyncio.Task[T] = sync.wait(_spawn(work))

    @property
    def over(self) -> bool:
        return self.task.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Its result or its error; `TimeoutError` where it is not over by then, and it goes on."""
        return sync.wait(_join(self.task, timeout_s))

    def end(self, timeout_s: float) -> None:
        """Cancel it, wait until it has cleaned up, and leave its error to `result`."""
        sync.wait(_end(self.task, timeout_s))


async def _spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.create_task(work)


async def _join(task: asyncio.Task[T], timeout_s: float | None) -> T:
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if not done:
        raise TimeoutError(f"not over after {timeout_s} s")
    return task.result()


async def _end(task: asyncio.Task[T], timeout_s: float) -> None:
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=timeout_s)
    if not done:
        raise TimeoutError(f"its clean-up is not over after {timeout_s} s")
    if not task.cancelled():
        task.exception()  # seen, so that the loop does not report it as lost
