"""The time by which a plane's instances, leases and keys end: the storage's, so that replicas agree whatever their machines say.

Between two looks at the storage the time is carried on by the machine's monotonic clock, which cannot be set.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollyard.core.errors import Error
from rollyard.core.log import Log
from rollyard.plane.storage.protocol import PlaneStore

_log = Log("rollyard.plane")
EVERY_S = 60.0
_TELL_S = 2.0  # a machine that is wrong by more is named


class StorageClock:
    """Called, it gives the time; until it was `read` that of `machine`, which may be wrong. An answer that took longer than
    `slow_s` says too little about when it was given."""

    def __init__(self, machine: Callable[[], float] = time.time, *, slow_s: float = 2.0) -> None:
        self._machine, self._slow_s = machine, slow_s
        self._ahead = machine() - time.monotonic()

    def __call__(self) -> float:
        return self._ahead + time.monotonic()

    async def read(self, store: PlaneStore) -> None:
        began = time.monotonic()
        now = await store.now()
        took = time.monotonic() - began
        if took < self._slow_s:
            self._ahead = now - (began + took / 2)

    async def start(self, store: PlaneStore) -> None:
        await self.read(store)
        wrong_s = self._machine() - self()
        if abs(wrong_s) > _TELL_S:
            _log.warning("this machine's clock is wrong; the storage's decides", ahead_s=round(wrong_s, 1))

    async def follow(self, store: PlaneStore) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.read(store)
            except Error as error:  # the time goes on without it
                _log.info("the storage's time could not be read", error=str(error))
