"""Keeping an owned sandbox: it is opened for a short time, and that time is renewed for as long as its opener lives.

So a sandbox ends by itself soon after a SIGKILL of everything, and no request of ours is needed for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rollyard.core.errors import Error


class Lease:
    """`keep` tells the server how many seconds are left from now; `end` is when the sandbox is to end for good."""

    def __init__(self, sandbox_id: str, seconds: float, end: float, keep: Callable[[int], Awaitable[None]]) -> None:
        self._id, self._seconds, self._keep = sandbox_id, seconds, keep
        self.end = end
        self._log: Any = structlog.get_logger("rollyard.sandbox.e2b")
        self._task = asyncio.create_task(self._renew(), name=f"rollyard-lease-{sandbox_id}")

    def term(self) -> int:
        """What the server is told: whole seconds."""
        return math.ceil(max(1.0, min(self._seconds, self.end - time.time())))

    async def extend(self, end: float) -> None:
        self.end = end
        await self._keep(self.term())
        if self._task.done():
            self._task = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while self.end - time.time() > self._seconds / 3:
            await asyncio.sleep(self._seconds / 3)
            try:
                await self._keep(self.term())
            except Error as error:  # the next one may succeed; until then the sandbox lives on what it was given
                self._log.warning("sandbox.lease_not_renewed", sandbox_id=self._id, error=str(error))
                if error.retry == "gone":
                    return

    def cancel(self) -> None:
        self._task.cancel()
