"""Heartbeats for the leases of one worker, from a thread with a connection of its own.

A worker with hundreds of rollouts that end together has hundreds of writes to do. Heartbeats that stood in line with them came
too late: the leases ran out, other workers claimed the attempts, and all that work began again. A worker is alive as long as
its loop goes on, however slowly. One whose loop stands still for `STILL` leases gets no more heartbeats, and its attempts go
to others.

A worker whose own heartbeats take long has no reason to call others dead: the database or the machine is overloaded. It takes
over what ran out only `STILL` leases later (`grace_s`), so an overloaded run becomes slower and does not begin again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
import anyio.to_thread

from rollyard.core.errors import StoreError
from rollyard.core.lease import Lease
from rollyard.core.log import Log
from rollyard.store import Store

STILL = 5.0  # leases: how long a worker's loop may stand still
_PROMPT = 1 / 6  # of a lease: a heartbeat that took longer was late
_STORE_S = 60.0  # for the first connection


class LeaseKeeper:
    """`held` gives the worker's leases and `turned_at` when its loop last went on, both asked from the thread. `lose` is called
    on the loop with leases that are another worker's by now, or whose rollouts ended meanwhile."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        lease_s: float,
        *,
        held: Callable[[], Sequence[Lease]],
        turned_at: Callable[[], float],
        lose: Callable[[Sequence[Lease]], None],
    ) -> None:
        self._where, self._clock = store.where, store.clock if store.lease_time() is not None else None
        self._run_id, self._lease_s = run_id, lease_s
        self._held, self._turned_at, self._lose = held, turned_at, lose
        self._took_s = 0.0  # by the last heartbeat
        self._began: float | None = None  # of the one that is under way
        self._over = False
        self._own: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None  # the thread's
        self._log = Log("rollyard.runs.run.lease_keeper")

    @property
    def grace_s(self) -> float:
        """How long ago leases of others must have run out before this worker takes them over."""
        began = self._began
        took_s = self._took_s if began is None else max(self._took_s, time.monotonic() - began)
        return STILL * self._lease_s if took_s > _PROMPT * self._lease_s else 0.0

    def measure_grace(self) -> Callable[[], float]:
        """The same for one request, asked when it gets to the database: one that had to wait until the database was back comes
        when the leases of all have run out, and takes none of them."""
        began = time.monotonic()

        def grace_s() -> float:
            late = time.monotonic() - began > _PROMPT * self._lease_s
            return STILL * self._lease_s if late else self.grace_s

        return grace_s

    async def run(self) -> None:
        """Run until cancelled; the thread has ended by then."""
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            group.start_soon(self._in_thread, loop)
            try:
                await anyio.sleep_forever()
            finally:
                self._over = True
                if self._own is not None:
                    own, task = self._own
                    with suppress(RuntimeError):  # it has ended
                        own.call_soon_threadsafe(task.cancel)

    async def _in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        def work() -> None:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._beat(loop))

        await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))

    async def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._own = (asyncio.get_running_loop(), task)
        if self._over:  # before the line above
            return
        while True:
            await asyncio.sleep(self._lease_s / 3)  # a run that ends sooner needs no connection for this
            try:
                async with Store.open(self._where, create=False, clock=self._clock, wait_s=_STORE_S) as store:
                    while True:
                        await self._renew(store, loop)
                        await asyncio.sleep(self._lease_s / 3)
            except StoreError as error:  # it is away, as it may be for the worker too
                self._log.warning("lease.not_kept", leases=len(self._held()), error=str(error))

    async def _renew(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        held, still_s = self._held(), time.monotonic() - self._turned_at()
        if still_s > STILL * self._lease_s:
            self._log.warning("worker.stands_still", seconds=round(still_s), leases=len(held))
            return
        self._began = began = time.monotonic()
        try:
            lost = await store.heartbeats(held, ttl_s=self._lease_s)
            self._took_s, self._began = time.monotonic() - began, None
            await store.reclaim(self._run_id, grace_s=self.measure_grace())
        except StoreError as error:
            self._log.warning("lease.not_kept", leases=len(held), error=str(error))
            return
        if gone := [lease for lease in held if lease.attempt.id in lost]:
            loop.call_soon_threadsafe(self._lose, gone)
