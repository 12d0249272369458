"""Waiting for a store that is away: restarted, paused, out of disk. What it refuses is refused at once."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollyard.core.errors import LeaseLost, StoreError
from rollyard.core.log import Log

T = TypeVar("T")

GIVE_UP_S = 600.0  # how long a store may be away before a waiting caller gives up
_FIRST_S, _LONGEST_S = 0.25, 5.0


async def repeat_until_done(operation: Callable[[], Awaitable[T]]) -> T:
    """Repeat an operation of the store until it happened. It must be one that may happen twice."""
    until, pause = time.monotonic() + GIVE_UP_S, _FIRST_S
    log = Log("rollyard.runs")
    while True:
        try:
            return await operation()
        except LeaseLost:
            raise
        except StoreError as error:
            if time.monotonic() > until:
                raise
            log.warning("store.away", error=str(error))
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
