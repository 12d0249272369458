"""How tests wait: for a condition, for what is ready to run, or not at all, by a clock that they move themselves."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]], *, within: float = 30.0) -> None:
    """Wait for what other tasks, threads or programs bring about; fails when it does not come."""
    async with asyncio.timeout(within):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


async def settle() -> None:
    """Let this loop's other tasks run until each waits for something: before saying that one has not gone on."""
    for _ in range(100):
        await asyncio.sleep(0)


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
