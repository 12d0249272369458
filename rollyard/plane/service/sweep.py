"""The sweep: expired, idle and abandoned instances go, on every engine; their quota comes back; strays go too. Those that do not
end with their time are paused.

Safe with any number of replicas: one holds the lease, and its fencing number is checked in the transactions that change
rows. Engines are asked between two transactions, and deleting there twice does no harm. An engine that fails or cannot list
keeps its own rows for the next round and touches no other engine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from rollyard.core.errors import Error, LeaseLost, PlaneNotFound
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.plane import Instance, InstanceState
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.service.metrics import PlaneCounters
from rollyard.plane.storage.protocol import PlaneStore

_log = Log("rollyard.plane")
BATCH = 500
_LEASE_S = 120.0
_AT_ONCE = 16
_AFTER: Mapping[str, tuple[InstanceState, str]] = {
    "running": ("expired", "its time was over"),
    "paused": ("expired", "its time was over"),
    "creating": ("failed", "its creation was abandoned"),
    "deleting": ("deleted", "its deletion was left half done"),
}


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """`held` is False when another replica sweeps."""

    held: bool = True
    due: int = 0
    ended: int = 0
    strays: int = 0
    failures: int = 0


class Sweeper:
    def __init__(
        self,
        store: PlaneStore,
        engines: Mapping[str, Engine],
        *,
        plane: str,
        settle_timeout: Callable[[str], Awaitable[object]],
        settle_s: float = 120.0,
        clock: Callable[[], float] = time.time,
        counters: PlaneCounters | None = None,
    ) -> None:
        self._counters = counters or PlaneCounters()
        self._store, self._engines, self._plane = store, engines, plane
        self._settle_timeout = settle_timeout
        self._settle_s, self._clock = settle_s, clock
        self._holder = new_id("sweep")
        self.last: Swept | None = None
        self.last_at: float | None = None

    async def once(self) -> Swept:
        self.last = await self._sweep()
        self.last_at = self._clock()
        return self.last

    async def _sweep(self) -> Swept:
        fence = await self._store.take_sweep(self._holder, now=self._clock(), ttl_s=_LEASE_S)
        if fence is None:
            return Swept(held=False)
        due = ended = failures = 0
        while True:
            claimed = await self._store.claim_due(fence, now=self._clock(), settle_s=self._settle_s, limit=BATCH)
            done = await self._find_gone([one for one in claimed if one.ends_with_its_time])
            kept = await self._keep([one for one in claimed if not one.ends_with_its_time])
            due, failures = due + len(claimed), failures + len(claimed) - len(done) - kept
            if done:
                ended += await self._store.finish_due(fence, done, now=self._clock())
            if len(claimed) < BATCH or not (done or kept):
                break
        await self._store.drop_of_ended()
        strays = await self._remove_strays()
        self._counters.swept.update({"due": due, "ended": ended, "strays": strays, "failures": failures})
        return Swept(due=due, ended=ended, strays=strays, failures=failures)

    async def forever(self, every_s: float) -> None:
        while True:
            try:
                swept = await self.once()
                if swept.due or swept.strays:
                    _log.info("swept", **msgspec.structs.asdict(swept))
            except LeaseLost:
                _log.info("another replica sweeps")
            except Exception:  # noqa: BLE001 - recorded; a round that failed must not end the sweep
                _log.exception("a sweep failed")
            await asyncio.sleep(every_s)

    async def _find_gone(self, claimed: list[Instance]) -> list[tuple[str, InstanceState, str]]:
        """Those that are certainly gone from their engines."""
        listings: dict[str, dict[str, str] | None] = {}
        for name in {instance.engine for instance in claimed if instance.ref is None}:
            listings[name] = await self._listing(name)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def settle(instance: Instance) -> bool:
            async with gate:
                return await self._is_gone(instance, listings.get(instance.engine))

        gone = await asyncio.gather(*(settle(instance) for instance in claimed))
        return [(one.id, *_AFTER[one.state]) for one, over in zip(claimed, gone, strict=True) if over]

    async def _keep(self, over: list[Instance]) -> int:
        """Pause those whose time is over and which are not ended by that; how many were."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def keep(instance: Instance) -> bool:
            async with gate:
                try:
                    await self._settle_timeout(instance.id)
                except (Error, TimeoutError, OSError) as error:
                    _log.warning("an instance was not paused", instance=instance.id, error=str(error))
                    return False
                return True

        return sum(await asyncio.gather(*map(keep, over)))

    async def _is_gone(self, instance: Instance, listing: dict[str, str] | None) -> bool:
        engine = self._engines.get(instance.engine)
        if engine is None:
            return False
        ref = instance.ref
        if ref is None and listing is not None:
            ref = listing.get(instance.id)
            if ref is None:
                return True
        if ref is None:  # it may be there under an unknown name: the engine's own time to live ends it
            return self._clock() >= instance.expires_at
        try:
            await engine.delete(ref)
        except (Error, TimeoutError, OSError) as error:
            _log.warning("an engine did not delete", engine=engine.name, instance=instance.id, error=str(error))
            return False
        return True

    async def _listing(self, name: str) -> dict[str, str] | None:
        """Instance to the engine's name for it; None where the engine cannot say."""
        engine = self._engines.get(name)
        if engine is None or not engine.capabilities.list:
            return None
        try:
            return {thing.instance_id: thing.ref for thing in await engine.list(self._plane)}
        except (Error, TimeoutError, OSError) as error:
            _log.warning("an engine did not list", engine=name, error=str(error))
            return None

    async def _remove_strays(self) -> int:
        """Things of this plane whose row is over: the row comes first, so one without a live row has no owner."""
        removed = 0
        for name, engine in self._engines.items():
            for instance_id, ref in (await self._listing(name) or {}).items():
                if await self._is_live(instance_id):
                    continue
                try:
                    await engine.delete(ref)
                    removed += 1
                except (Error, TimeoutError, OSError) as error:
                    _log.warning("a stray was not deleted", engine=name, ref=ref, error=str(error))
        return removed

    async def _is_live(self, instance_id: str) -> bool:
        try:
            return (await self._store.get_instance(instance_id)).live
        except PlaneNotFound:
            return False
