"""A plane that dies at any step of any change leaves nothing unowned, and its quota comes back (P3, P10)."""

import pytest

from rollyard.core.errors import PlaneNotFound
from rollyard.core.plane import EnvSpec
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.pools import PutPool
from rollyard.plane.storage.open import open_plane
from tests.plane.conftest import OWNER

pytestmark = pytest.mark.anyio
HOST = CreateInstance(image="host")


class Died(BaseException):
    """The process is gone: nothing after this runs, not even a clean-up of ordinary errors."""


class Until:
    """Passes so many calls on, in all its places together, and dies at the next: before it or after it."""

    def __init__(self, calls, after):
        self.left, self.after = calls, after

    def around(self, part, names):
        return _Dying(part, names, self)


class _Dying:
    def __init__(self, part, names, until):
        self._part, self._names, self._until = part, names, until

    def __getattr__(self, name):
        found = getattr(self._part, name)
        if name not in self._names:
            return found

        async def counted(*args, **kwargs):
            self._until.left -= 1
            if self._until.left < 0 and not self._until.after:
                raise Died
            result = await found(*args, **kwargs)
            if self._until.left < 0:
                raise Died
            return result

        return counted


class Freezing(NoopEngine):
    """Also takes snapshots, of nothing."""

    @property
    def capabilities(self):
        import msgspec

        return msgspec.structs.replace(super().capabilities, snapshot=True, pause=True, exec=True)

    async def sandbox(self, ref):
        return self

    async def snapshot(self):
        return "snap_1"

    async def pause(self):
        return None

    resume = pause


async def create(plane):
    await plane.instances.create(HOST, owner="ann")


async def delete(plane):
    made = await plane.instances.create(HOST, owner="ann")
    await plane.instances.delete(made.id)


async def fork(plane):
    made = await plane.instances.create(HOST, owner="ann")
    await plane.instances.pause(made.id)
    await plane.instances.resume(made.id)
    await plane.instances.fork(made.id, 2)


async def pool(plane):
    await plane.pools.put("p", PutPool(size=2, instance=HOST))
    await plane.pools.fill()
    await plane.instances.create(CreateInstance(pool="p"), owner="ann")
    await plane.pools.remove("p")


async def sweep(plane):
    await plane.instances.create(CreateInstance(image="host", ttl_s=1), owner="ann")
    plane.clock.now += 2
    await plane.sweeper.once()


STORE = ("begin", "step", "end", "take", "put_pool", "remove_pool", "take_sweep", "claim_due", "finish_due", "touch")
ENGINE = ("create", "delete", "snapshot", "pause", "resume", "list", "extend", "alive")


@pytest.mark.parametrize("plane_url", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("can_list", [True, False], ids=["lists", "cannot-list"])
@pytest.mark.parametrize("change", [create, delete, fork, pool, sweep])
async def test_death_at_every_step(plane_url, clock, assemble, change, can_list):
    died = 0
    async with open_plane(plane_url) as (store, _):
        for calls in range(40):
            for after in (False, True):
                engine, until = Freezing(clock=clock, can_list=can_list), Until(calls, after)
                dying = until.around(store, STORE)
                plane = await assemble(dying, {"noop": until.around(engine, ENGINE)}, clock)
                try:
                    await change(plane)
                except Died:
                    died += 1
                await settled(store, engine, clock, assemble)
            if until.left >= 0:
                break
        else:
            raise AssertionError("the change never ended")
    assert died >= 4


async def settled(store, engine, clock, assemble):
    """Another process starts on the same storage; time passes; nothing is left of what the dead one had under way."""
    plane = await assemble(store, {"noop": engine}, clock)
    owners = ("ann", "pool/p")
    known = {one.ref for one in (await plane.instances.page(limit=500))[0] if one.ref}
    unowned = {ref for ref, (_, instance_id, _) in engine.things.items() if ref not in known}
    for ref in unowned:  # whatever the engine has, a live row is about it
        assert (await plane.instances.record(engine.things[ref][1])).live
    clock.now += 10_000
    swept = await plane.sweeper.once()
    clock.now += 10_000
    swept = await plane.sweeper.once()
    assert swept.failures == 0
    try:
        await plane.pools.remove("p")
    except PlaneNotFound:
        pass
    assert [(await store.usage(owner)).used for owner in owners] == [0, 0]
    assert [ref for ref in engine.things if await engine.alive(ref)] == []
    assert (await plane.instances.page(limit=500))[0] == []


async def test_an_environment_with_a_program_is_refused_by_an_engine_that_starts_none(plane):
    from rollyard.core.errors import PlaneUnsupported

    await plane.hub.create("e", "1", EnvSpec(start=("server",)), by=OWNER)
    with pytest.raises(PlaneUnsupported, match="start a program"):
        await plane.instances.create(CreateInstance(env="e@1"), owner="ann")
