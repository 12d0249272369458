"""A rollout that a blocking caller takes stage by stage: it waits before the agent starts, before it is judged and before its
sandbox is closed, until the caller says go.

It runs on the loop of `rollyard.sync`. A caller that gives up cancels it, and nothing is left.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any, get_args

from rollyard import sync
from rollyard.core.errors import SessionNotStarted
from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import Rollout
from rollyard.runs.rollout.plan import PausePoint, StagePauses
from rollyard.train.background import BackgroundWork

ORDER: tuple[PausePoint, ...] = get_args(PausePoint)
CLOSING_S = 60.0


class StepwiseRollout:
    """`work` runs the rollout at the pauses that it is given."""

    def __init__(self, work: Callable[[StagePauses], Coroutine[Any, Any, Rollout]], *, hold_s: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is read after the rollout, and goes with this object
        self._changed = asyncio.Condition()
        self._reached = -1
        self._allowed = -1
        self._over = False
        self.sandbox: Sandbox | None = None
        self.rollout: Rollout | None = None  # as it was when it last stopped, or as it ended
        pauses = StagePauses(at=self._stop_at, hold_s=hold_s, log=self._log)
        self._work = BackgroundWork(self._run(work(pauses)))

    @property
    def over(self) -> bool:
        return self._work.over

    @property
    def judged(self) -> bool:
        return self._reached == len(ORDER) - 1

    def go(self, past: PausePoint) -> None:
        """Lets it go on from there, now or when it comes there."""
        sync.wait(self._allow(ORDER.index(past)))

    def reach(self, point: PausePoint, timeout_s: float | None = None) -> Rollout:
        """The rollout when it has come so far, or has ended before; its error where it raised one. `TimeoutError` leaves it
        running."""
        return sync.wait(self._reach(ORDER.index(point), timeout_s))

    def require(self, point: PausePoint, timeout_s: float | None = None) -> None:
        """Waits until it has come so far; `SessionNotStarted` where it ended before, and then nothing of it is left."""
        rollout = self.reach(point, timeout_s)
        if self._reached < ORDER.index(point):
            raise SessionNotStarted(rollout)

    def printed(self) -> bytes:
        """All that the agent has printed until now."""
        return sync.wait(self._read())

    def end(self) -> None:
        """Closes its sandbox: a rollout that was judged ends by itself, any other is cancelled. A second time does nothing."""
        if self._work.over:
            return
        if self.judged:
            self.go("over")
            self._work.result(CLOSING_S)
        else:
            self._work.end(CLOSING_S)

    # on the loop

    async def _run(self, work: Coroutine[Any, Any, Rollout]) -> Rollout:
        try:
            self.rollout = await work
            return self.rollout
        finally:
            async with self._changed:
                self._over, self.sandbox = True, None
                self._changed.notify_all()

    async def _stop_at(self, point: PausePoint, sandbox: Sandbox, rollout: Rollout) -> None:
        place = ORDER.index(point)
        async with self._changed:
            if point == "over" and self._reached < ORDER.index("started"):
                return  # it never came to its agent: there is nothing to look at
            self._reached, self.sandbox, self.rollout = max(self._reached, place), sandbox, rollout
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._allowed >= place or point == "started")

    async def _allow(self, place: int) -> None:
        async with self._changed:
            self._allowed = max(self._allowed, place)
            self._changed.notify_all()

    async def _reach(self, place: int, timeout_s: float | None) -> Rollout:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._reached >= place or self._over)
        except TimeoutError:
            raise TimeoutError(f"the rollout has not come to {ORDER[place]!r} after {timeout_s} s") from None
        if self.rollout is None:
            return await asyncio.shield(self._work.task)
        return self.rollout

    async def _read(self) -> bytes:
        self._log.seek(0)
        try:
            return self._log.read()
        finally:
            self._log.seek(0, 2)
