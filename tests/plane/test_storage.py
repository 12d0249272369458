"""What storage promises to any number of replicas, on every kind of storage (P1, P2)."""

import asyncio

import pytest

from rollyard.core.errors import PlaneNotFound, PlaneQuota, PlaneRateLimited
from rollyard.core.plane import AdmissionTerms, Taking, WarmPool
from rollyard.plane.storage.open import open_plane
from tests.plane.writers import instance

EVERY_STORAGE = ("sqlite", "postgres", "redis", "redis-no-multi", "redis-least")
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("plane_url", EVERY_STORAGE, indirect=True)]


@pytest.fixture
async def store(plane_url):
    async with open_plane(plane_url) as (store, _):
        yield store


async def test_a_rate_lets_a_burst_in_and_then_one_at_a_time(store):
    terms = AdmissionTerms(rate=2.0, burst=3)
    results = await asyncio.gather(
        *(store.begin(instance("ann", now=100.0), terms=terms, request=None) for _ in range(8)), return_exceptions=True
    )
    refused = [one for one in results if isinstance(one, PlaneRateLimited)]
    assert len(refused) == 5 and all(one.retry_after == pytest.approx(0.5) for one in refused)
    assert (await store.usage("ann")).used == 3
    with pytest.raises(PlaneRateLimited):
        await store.begin(instance("ann", now=100.4), terms=terms, request=None)
    await store.begin(instance("ann", now=100.5), terms=terms, request=None)
    await store.begin(instance("bob", now=100.5), terms=terms, request=None)
    await store.set_terms("ann", rate=0.0)
    for _ in range(5):
        await store.begin(instance("ann", now=100.5), terms=terms, request=None)
    assert (await store.set_terms("ann", rate=7.5, quota=3)) == await store.usage("ann")
    assert ((await store.usage("ann")).rate, (await store.usage("ann")).quota) == (7.5, 3)
    assert (await store.set_terms("ann", rate=None)).quota == 3


async def test_one_that_waits_in_a_pool_is_taken_by_exactly_one(store):
    pool = await store.put_pool(WarmPool(name="p", size=4, plan="{}", created_at=1.0))
    for _ in range(4):
        new, _ = await store.begin(instance(pool.owner), terms=AdmissionTerms(), request=None)
        await store.step(new.id, ("creating",), "running", at=1.0, ref=new.id)
    with pytest.raises(PlaneQuota):
        await store.begin(instance(pool.owner), terms=AdmissionTerms(), request=None)
    taking = Taking(owner="ann", at=2.0, labels={"a": "b"}, rollout_id="ro_1")
    taken = await asyncio.gather(*(store.take(pool, taking, terms=AdmissionTerms(), request=None) for _ in range(9)))
    ids = [one[0].id for one in taken if one is not None]
    assert len(ids) == len(set(ids)) == 4
    assert ((await store.usage(pool.owner)).used, (await store.usage("ann")).used) == (0, 4)
    query = {"env": None, "run_id": None, "live": True, "after": "", "limit": 9}
    mine = await store.list_instances(owner="ann", rollout_id="ro_1", labels={"a": "b"}, **query)
    assert sorted(one.id for one in mine) == sorted(ids)
    assert await store.list_instances(owner=pool.owner, rollout_id=None, labels={}, **query) == []
    assert (await store.history(ids[0]))[-1].reason == "taken from pool p"
    assert (
        await store.list_pools() == [pool]
        and (await store.put_pool(WarmPool(name="p", size=2, plan="{}", created_at=9.0))).size == 2
    )
    await store.remove_pool("p")
    with pytest.raises(PlaneNotFound):
        await store.get_pool("p")


async def test_the_same_request_takes_one_from_a_pool_once(store):
    pool = await store.put_pool(WarmPool(name="p", size=2, plan="{}", created_at=1.0))
    for _ in range(2):
        new, _ = await store.begin(instance(pool.owner), terms=AdmissionTerms(), request=None)
        await store.step(new.id, ("creating",), "running", at=1.0, ref=new.id)
    request = ("caller", "once", b"digest")
    first, second = [
        await store.take(pool, Taking(owner="ann", at=2.0), terms=AdmissionTerms(), request=request) for _ in "ab"
    ]
    assert first[0].id == second[0].id and (first[1], second[1]) == (True, False)


async def test_changes_are_found_by_their_time_and_bundles_by_their_digest(store):
    made = [await store.begin(instance("ann", now=float(n)), terms=AdmissionTerms(), request=None) for n in range(1, 6)]
    await store.begin(instance("bob", now=9.0), terms=AdmissionTerms(), request=None)
    assert [one.updated_at for one in await store.list_changed(owner="ann", since=3.0, limit=9)] == [3.0, 4.0, 5.0]
    await store.end(made[0][0].id, "failed", at=20.0, reason="why")
    last = await store.list_changed(owner=None, since=9.0, limit=9)
    assert [(one.owner, one.state) for one in last] == [("bob", "creating"), ("ann", "failed")]
    assert await store.counts() == {("noop", "creating"): 5}
    assert not await store.has_blob("d" * 64)
    assert await store.put_blob("d" * 64, b"\x00\xff", owner="ann", at=1.0)
    assert not await store.put_blob("d" * 64, b"\x00\xff", owner="ann", at=1.0)
    assert await store.get_blob("d" * 64) == b"\x00\xff"
    with pytest.raises(PlaneNotFound):
        await store.get_blob("e" * 64)
