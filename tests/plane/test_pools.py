"""Warm pools: an upper bound that is never exceeded, taking as a change of owner, filling by several replicas."""

import asyncio

import pytest

from rollyard.core.errors import PlaneInvalid, PlaneNotFound, PlaneQuota
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.pools import PutPool
from rollyard.plane.storage.open import open_plane

pytestmark = pytest.mark.anyio
WARM = CreateInstance(pool="p")


class Counting(NoopEngine):
    """Remembers the most that ever stood for the pool at once; each takes a moment to make."""

    most = 0

    async def create(self, instance, plane):
        ref = await super().create(instance, plane)
        self.waiting = getattr(self, "waiting", set())
        if instance.owner.startswith("pool/"):
            self.waiting.add(ref)
            self.most = max(self.most, len(self.waiting))
        await asyncio.sleep(0.001)
        return ref

    async def delete(self, ref):
        self.waiting.discard(ref)
        await super().delete(ref)


async def test_the_bound_holds_while_replicas_fill_and_callers_take(plane_url, clock, assemble):
    engine = Counting(clock=clock)
    async with open_plane(plane_url) as (one, _), open_plane(plane_url) as (two, _):
        planes = [await assemble(store, {"noop": engine}, clock) for store in (one, two)]
        await planes[0].pools.put("p", PutPool(size=6, instance=CreateInstance(image="host", ttl_s=60)))

        async def take(plane):
            made = await plane.instances.create(WARM, owner="ann")
            engine.waiting.discard(made.ref)

        await asyncio.gather(*(plane.pools.fill() for plane in planes * 3))
        assert (await one.usage("pool/p")).used == engine.most == 6
        await asyncio.gather(*(take(plane) for plane in planes * 3), *(plane.pools.fill() for plane in planes * 3))
        await asyncio.gather(*(plane.pools.fill() for plane in planes))
        assert engine.most <= 6 + 6  # what is being taken is still counted here a moment longer
        assert (await one.usage("pool/p")).used == 6 and (await one.usage("ann")).used == 6
        assert len(engine.things) == 12


async def test_one_from_a_pool_is_the_callers_own_in_every_way(plane, noop):
    await plane.pools.put("p", PutPool(size=1, instance=CreateInstance(image="host", ttl_s=60)))
    await plane.pools.fill()
    waiting = (await plane.instances.page(owner="pool/p"))[0][0]
    plane.clock.now += 30
    asked = CreateInstance(pool="p", labels={"a": "b"}, run_id="r", rollout_id="ro", ttl_s=500)
    taken = await plane.instances.create(asked, owner="ann", caller="k", key="once")
    assert taken.id == waiting.id and taken.created_at == waiting.created_at
    assert (taken.owner, taken.run_id, taken.rollout_id, taken.labels) == ("ann", "r", "ro", {"a": "b"})
    assert taken.expires_at == plane.clock.now + 500 and noop.things[taken.ref][2] == plane.clock.now + 500
    again = await plane.instances.create(asked, owner="ann", caller="k", key="once")
    assert again.id == taken.id
    cold = await plane.instances.create(WARM, owner="ann")
    assert cold.id != taken.id and cold.plan.ttl_s == 60
    assert (await plane.store.usage("ann")).used == 2
    await plane.store.set_terms("ann", quota=2)
    await plane.pools.fill()
    with pytest.raises(PlaneQuota):
        await plane.instances.create(WARM, owner="ann")
    assert (await plane.store.usage("pool/p")).used == 1
    await plane.pools.remove("p")
    assert set(noop.things) == {taken.ref, cold.ref}
    with pytest.raises(PlaneNotFound):
        await plane.instances.create(WARM, owner="ann")


async def test_one_that_died_while_it_waited_is_not_handed_out(plane, noop):
    await plane.pools.put("p", PutPool(size=2, instance=CreateInstance(image="host")))
    await plane.pools.fill()
    first = (await plane.instances.page(owner="pool/p"))[0][0]
    del noop.things[first.ref]
    taken = await plane.instances.create(WARM, owner="ann")
    assert taken.id != first.id and (await plane.instances.record(first.id)).state == "failed"
    assert (await plane.store.usage("ann")).used == 1


async def test_a_smaller_pool_gives_up_what_is_too_much_and_what_it_cannot_take_is_refused(plane, noop):
    await plane.pools.put("p", PutPool(size=3, instance=CreateInstance(image="host")))
    await plane.pools.fill()
    await plane.pools.put("p", PutPool(size=1, instance=CreateInstance(image="host")))
    await plane.pools.fill()
    assert len(noop.things) == 1
    for late in ({"environment": {"A": "b"}}, {"arguments": ("x",)}, {"image": "host"}, {"engine": "noop"}):
        with pytest.raises(PlaneInvalid):
            await plane.instances.create(CreateInstance(pool="p", **late), owner="ann")
    for name, size in (("a/b", 1), ("p", -1)):
        with pytest.raises(PlaneInvalid):
            await plane.pools.put(name, PutPool(size=size, instance=CreateInstance(image="host")))


async def test_nobody_may_be_called_like_a_pool(plane):
    with pytest.raises(PlaneInvalid):
        await plane.instances.create(CreateInstance(image="host", owner="pool/p"), owner="pool/p")
