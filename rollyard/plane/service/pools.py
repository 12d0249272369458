"""Warm pools: instances made ahead of their use, so that a creation from one is a change of owner.

What waits in a pool belongs to the pool, whose size is its quota. Filling is therefore an ordinary creation that is refused at
the bound, and the bound holds however many replicas fill at once. An engine that fails leaves the pool short until the next
round, never over.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import msgspec

from rollyard.core.errors import Error, PlaneInvalid, PlaneNotFound, PlaneQuota
from rollyard.core.log import Log
from rollyard.core.plane import WarmPool
from rollyard.plane.service.create_request import CreateInstance, check_request
from rollyard.plane.service.instances import Instances
from rollyard.plane.storage.protocol import PlaneStore

_log = Log("rollyard.plane")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_AT_ONCE = 8
MAX_SIZE = 10_000


class PutPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size` is the most that ever wait; `instance` is what they are."""

    size: int
    instance: CreateInstance


class Pools:
    def __init__(self, store: PlaneStore, instances: Instances, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._instances, self._clock = store, instances, clock

    async def put(self, name: str, wanted: PutPool) -> WarmPool:
        if not _NAME.fullmatch(name):
            raise PlaneInvalid(f"pool name {name!r} is not 1 to 100 letters, digits, dots, dashes and underscores")
        if not 0 <= wanted.size <= MAX_SIZE:
            raise PlaneInvalid(f"size is from 0 to {MAX_SIZE}")
        check_request(wanted.instance, self._instances.settings)
        if wanted.instance.pool is not None or wanted.instance.owner is not None:
            raise PlaneInvalid("what waits in a pool belongs to it and comes from an env or an image")
        plan = msgspec.json.encode(wanted.instance).decode()
        made = await self._store.put_pool(WarmPool(name=name, size=wanted.size, plan=plan, created_at=self._clock()))
        self._instances.wanted.set()
        return made

    async def page(self) -> list[tuple[WarmPool, int]]:
        """Each with how many live in it, those that are being made included."""
        return [(pool, (await self._store.usage(pool.owner)).used) for pool in await self._store.list_pools()]

    async def remove(self, name: str) -> None:
        pool = await self._store.remove_pool(name)
        await self._shrink(pool, 0)

    async def fill(self) -> int:
        """Bring every pool to its size; gives how many instances were made."""
        return sum([await self._fill(pool) for pool in await self._store.list_pools()])

    async def forever(self, every_s: float) -> None:
        """Fill when something was taken, and every so often."""
        wanted = self._instances.wanted
        while True:
            wanted.clear()
            try:
                await self.fill()
            except Exception:  # noqa: BLE001 - recorded; a round that failed must not end the filling
                _log.exception("pools were not filled")
            try:
                async with asyncio.timeout(every_s):
                    await wanted.wait()
            except TimeoutError:
                continue

    async def _fill(self, pool: WarmPool) -> int:
        used = (await self._store.usage(pool.owner)).used
        if used > pool.size:
            await self._shrink(pool, pool.size)
        wanted, gate = msgspec.json.decode(pool.plan, type=CreateInstance), asyncio.Semaphore(_AT_ONCE)

        async def one() -> bool:
            async with gate:
                try:
                    await self._instances.create(wanted, owner=pool.owner)
                except PlaneQuota:
                    return False  # another replica was first
                except (Error, TimeoutError, OSError) as error:
                    _log.warning("an instance for a pool was not made", pool=pool.name, error=str(error))
                    return False
                return True

        return sum(await asyncio.gather(*(one() for _ in range(pool.size - used))))

    async def _shrink(self, pool: WarmPool, size: int) -> None:
        found, _ = await self._instances.page(owner=pool.owner, limit=500)
        for instance in found[size:]:
            try:
                await self._instances.delete(instance.id, reason="its pool got smaller")
            except PlaneNotFound:
                continue  # it was taken or has ended meanwhile
