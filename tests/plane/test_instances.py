"""Instances on an engine that makes nothing: journal, quota, time to live, sweep, crashes between steps."""

import asyncio

import msgspec
import pytest

from rollyard.core.errors import (
    LeaseLost,
    PlaneConflict,
    PlaneGone,
    PlaneInvalid,
    PlaneNotFound,
    PlaneQuota,
    PlaneUnsupported,
    SandboxUnavailable,
)
from rollyard.core.plane import EnvSpec
from rollyard.core.sandbox import Mount
from rollyard.plane.engines.noop import NoopEngine
from rollyard.plane.service.instances import CreateInstance
from rollyard.plane.service.sweep import Sweeper
from rollyard.plane.storage.open import open_plane
from tests.plane.conftest import OWNER

pytestmark = pytest.mark.anyio
HOST = CreateInstance(image="host")


async def states(plane, instance_id):
    return [line.state for line in await plane.instances.history(instance_id)]


async def test_an_instance_lives_and_is_gone(plane, noop):
    await plane.hub.create("e", "1", EnvSpec(image="python", ttl_s=60), by=OWNER)
    made = await plane.instances.create(CreateInstance(env="e@1", labels={"a": "b"}), owner="ann")
    assert (made.state, made.plan.image, made.expires_at) == ("running", "python", plane.clock.now + 60)
    created = made.created_at
    plane.clock.now += 10
    assert (await plane.instances.get(made.id)).created_at == created
    assert (await plane.store.usage("ann")).used == 1
    await plane.instances.delete(made.id)
    assert noop.things == {}
    with pytest.raises(PlaneNotFound):
        await plane.instances.get(made.id)
    with pytest.raises(PlaneNotFound):
        await plane.instances.delete(made.id)
    with pytest.raises(PlaneGone):
        await plane.instances.heartbeat(made.id)
    assert await states(plane, made.id) == ["creating", "running", "deleting", "deleted"]
    assert (await plane.store.usage("ann")).used == 0


async def test_the_quota_is_exact_whatever_runs_at_once(plane, noop):
    await plane.store.set_terms("ann", quota=5)
    results = await asyncio.gather(
        *(plane.instances.create(HOST, owner="ann") for _ in range(32)), return_exceptions=True
    )
    made = [one for one in results if not isinstance(one, Exception)]
    assert len(made) == len(noop.things) == 5
    assert all(isinstance(one, PlaneQuota) for one in results if isinstance(one, Exception))
    twice = [one.id for one in made for _ in range(2)]
    await asyncio.gather(*(plane.instances.delete(one) for one in twice), return_exceptions=True)
    assert (await plane.store.usage("ann")).used == 0
    await plane.instances.create(HOST, owner="ann")
    assert (await plane.store.usage("ann")).used == 1


async def test_the_same_idempotency_key_makes_one_instance(plane, noop):
    made = await asyncio.gather(*(plane.instances.create(HOST, owner="ann", caller="k", key="x") for _ in range(8)))
    assert len({one.id for one in made}) == len(noop.things) == (await plane.store.usage("ann")).used == 1
    with pytest.raises(PlaneConflict, match="another request"):
        await plane.instances.create(CreateInstance(image="host", ttl_s=9), owner="ann", caller="k", key="x")
    other = await plane.instances.create(HOST, owner="bob", caller="another", key="x")
    assert other.id != made[0].id


async def test_expired_and_idle_ones_are_swept_and_beating_ones_stay(plane, noop):
    short = await plane.instances.create(CreateInstance(image="host", ttl_s=10), owner="ann")
    idle = await plane.instances.create(CreateInstance(image="host", idle_ttl_s=10), owner="ann")
    beating = await plane.instances.create(CreateInstance(image="host", idle_ttl_s=10), owner="ann")
    longer = await plane.instances.create(CreateInstance(image="host", ttl_s=10), owner="ann")
    await plane.instances.extend(longer.id, 100)
    plane.clock.now += 8
    await plane.instances.heartbeat(beating.id)
    plane.clock.now += 4
    swept = await plane.sweeper.once()
    assert (swept.due, swept.ended, swept.failures) == (2, 2, 0)
    assert {thing[1] for thing in noop.things.values()} == {beating.id, longer.id}
    assert (await plane.store.usage("ann")).used == 2
    assert (await states(plane, short.id))[-1] == (await states(plane, idle.id))[-1] == "expired"


class Pausing(NoopEngine):
    """Notes what becomes of the things it makes, which are their own sandboxes."""

    def __init__(self, clock):
        super().__init__(clock=clock)
        self.seen = []

    @property
    def capabilities(self):
        return msgspec.structs.replace(super().capabilities, pause=True, exec=True)

    async def sandbox(self, ref):
        return self

    async def pause(self):
        self.seen.append("pause")

    async def resume(self):
        self.seen.append("resume")

    async def kill_processes(self):
        self.seen.append("kill_processes")


@pytest.mark.parametrize("way", ["pause", "stop"])
async def test_the_sweep_pauses_what_does_not_end_with_its_time_and_keeps_it(plane_url, clock, assemble, way):
    engine = Pausing(clock)
    async with open_plane(plane_url) as opened:
        plane = await assemble(opened.records, {"noop": engine}, clock)
        asked = CreateInstance(image="host", ttl_s=10, on_timeout=way, auto_resume=way == "pause")
        made = await plane.instances.create(asked, owner="ann")
        clock.now += 5
        await plane.sweeper.once()
        assert (await plane.instances.get(made.id)).state == "running"
        for _ in range(3):  # far beyond its time, and renewed each time
            clock.now += 6 * 86400
            swept = await plane.sweeper.once()
            assert (swept.due, swept.ended, swept.failures, swept.strays) == (1, 0, 0, 0)
            assert (await plane.instances.get(made.id)).state == "paused" and len(engine.things) == 1
        assert engine.seen == (["pause"] if way == "pause" else ["kill_processes", "pause"])
        if way == "pause":
            await plane.instances.sandbox(made.id)
            assert (await plane.instances.get(made.id)).expires_at == clock.now + 10
        else:
            with pytest.raises(PlaneConflict, match="paused"):
                await plane.instances.sandbox(made.id)
        await plane.instances.delete(made.id)
        assert (await plane.store.usage("ann")).used == 0


async def test_what_an_engine_cannot_pause_is_refused_before_it_is_made(plane, noop):
    with pytest.raises(PlaneUnsupported, match="pause an instance"):
        await plane.instances.create(CreateInstance(image="host", on_timeout="pause"), owner="ann")
    with pytest.raises(PlaneInvalid, match="auto_resume"):
        await plane.instances.create(CreateInstance(image="host", auto_resume=True), owner="ann")
    assert noop.things == {}


async def test_more_than_one_batch_is_swept_at_once(plane, noop):
    await asyncio.gather(
        *(plane.instances.create(CreateInstance(image="host", ttl_s=1), owner="ann") for _ in range(520))
    )
    plane.clock.now += 2
    assert (await plane.sweeper.once()).ended == 520
    assert noop.things == {} and (await plane.store.usage("ann")).used == 0


class Died(BaseException):
    """The process's end: it goes past every handler."""


class Dies(NoopEngine):
    """A process that ends at one step: before the engine makes a thing, after, or when one is to be deleted."""

    at = "none"

    async def create(self, instance, plane):
        if self.at == "before":
            raise Died
        ref = await super().create(instance, plane)
        if self.at == "after":
            raise Died
        return ref

    async def delete(self, ref):
        if self.at == "delete":
            raise Died
        await super().delete(ref)


@pytest.mark.parametrize("step", ["before", "after", "delete"])
@pytest.mark.parametrize("can_list", [True, False])
async def test_a_crash_between_two_steps_leaves_nothing_unowned(plane_url, clock, assemble, step, can_list):
    engine = Dies(clock=clock, can_list=can_list)
    async with open_plane(plane_url) as (store, _):
        plane = await assemble(store, {"noop": engine}, clock)
        made = await plane.instances.create(HOST, owner="ann") if step == "delete" else None
        engine.at = step
        try:
            await (plane.instances.delete(made.id) if made else plane.instances.create(HOST, owner="ann"))
        except Died:
            pass
        engine.at = "none"
        assert (await plane.store.usage("ann")).used == 1
        clock.now += 10_000
        assert (await plane.sweeper.once()).failures == 0
        assert (await plane.store.usage("ann")).used == 0
        assert [thing for thing in engine.things if await engine.alive(thing)] == []
        if can_list:
            assert engine.things == {}


async def test_an_engine_that_cannot_list_does_not_stop_the_sweep_of_others(plane_url, clock, assemble):
    listing, mute = NoopEngine(clock=clock), NoopEngine(clock=clock, can_list=False)
    mute.name = "mute"
    async with open_plane(plane_url) as (store, _):
        plane = await assemble(store, {"noop": listing, "mute": mute}, clock)
        for name in ("noop", "mute"):
            await plane.instances.create(CreateInstance(image="host", engine=name, ttl_s=5), owner="ann")
        clock.now += 6
        assert (await plane.sweeper.once()).ended == 2
        assert listing.things == mute.things == {}


class Refusing(NoopEngine):
    async def create(self, instance, plane):
        await super().create(instance, plane)
        raise SandboxUnavailable("no room")


async def test_a_failed_creation_gives_its_quota_back_and_leaves_nothing(plane_url, clock, assemble):
    engine = Refusing(clock=clock)
    async with open_plane(plane_url) as (store, _):
        plane = await assemble(store, {"noop": engine}, clock)
        with pytest.raises(SandboxUnavailable):
            await plane.instances.create(HOST, owner="ann")
        assert engine.things == {} and (await plane.store.usage("ann")).used == 0
        found, _ = await plane.instances.page(live=None)
        assert (found[0].state, found[0].reason) == ("failed", "no room")


async def test_a_stray_of_this_plane_is_removed_and_another_planes_thing_is_not(plane, noop):
    made = await plane.instances.create(HOST, owner="ann")
    noop.things["stray"] = (noop.things[made.ref][0], "inst_unknown", 2e9)
    noop.things["foreign"] = ("another-plane", "inst_unknown", 2e9)
    assert (await plane.sweeper.once()).strays == 1
    assert set(noop.things) == {made.ref, "foreign"}


async def test_only_one_replica_sweeps_and_a_late_one_changes_nothing(plane, noop):
    other = Sweeper(
        plane.store,
        {"noop": noop},
        plane="test-plane",
        settle_timeout=plane.instances.settle_timeout,
        clock=plane.clock,
    )
    fence = await plane.store.take_sweep("first", now=plane.clock.now, ttl_s=60)
    assert not (await other.once()).held
    plane.clock.now += 61
    assert (await other.once()).held
    with pytest.raises(LeaseLost):
        await plane.store.claim_due(fence, now=plane.clock.now, settle_s=1, limit=1)


async def test_what_an_engine_cannot_honour_is_refused_by_name(plane):
    for asked in (
        CreateInstance(image="host", start=("server",), arguments=("--fast",)),
        CreateInstance(image="host", mount_points=(Mount(local_dir="/a", remote_dir="/b"),)),
    ):
        with pytest.raises(PlaneUnsupported, match="noop cannot"):
            await plane.instances.create(asked, owner="ann")
    assert (await plane.store.usage("ann")).used == 0


async def test_lists_filter_by_owner_and_labels_and_page(plane):
    for n in range(5):
        await plane.instances.create(CreateInstance(image="host", labels={"n": str(n % 2)}), owner="ann")
    await plane.instances.create(CreateInstance(image="host", labels={"n": "0"}), owner="bob")
    found, cursor = await plane.instances.page(owner="ann", labels={"n": "0"}, limit=2)
    rest, end = await plane.instances.page(owner="ann", labels={"n": "0"}, limit=2, cursor=cursor)
    assert (len(found), len(rest), end) == (2, 1, None)
    assert len((await plane.instances.page())[0]) == 6
