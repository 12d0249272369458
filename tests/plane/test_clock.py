"""Replicas agree about the time, whatever their machines say (P2)."""

import time

import pytest

from rollyard.plane.service.clock import StorageClock
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.storage.open import open_plane

pytestmark = pytest.mark.anyio
SHARED = ("postgres", "redis", "redis-least")
NEAR_S = 60.0  # the machine may be slow; the clocks below are wrong by an hour


def an_hour_ahead():
    return time.time() + 3600


@pytest.mark.parametrize("plane_url", SHARED, indirect=True)
async def test_a_replica_whose_clock_is_an_hour_ahead_ends_nothing_early(plane_url, assemble, noop):
    async with open_plane(plane_url) as (store, _):
        right, wrong = StorageClock(), StorageClock(an_hour_ahead)
        assert wrong() - right() > 3600 - NEAR_S
        for clock in (right, wrong):
            await clock.start(store)
        assert abs(wrong() - right()) < NEAR_S
        first, second = [await assemble(store, {"noop": noop}, clock) for clock in (right, wrong)]
        made = await first.instances.create(CreateInstance(image="host", ttl_s=600), owner="ann")
        swept = await second.sweeper.once()
        assert swept.held and swept.due == 0
        assert (await store.get_instance(made.id)).live


async def test_an_answer_that_took_long_does_not_set_the_clock():
    class Storage:
        async def now(self):
            return 5.0

    patient, hasty = StorageClock(slow_s=3600.0), StorageClock(slow_s=0.0)
    for clock in (patient, hasty):
        await clock.read(Storage())
    assert patient() < 3600 and hasty() > 1e9
