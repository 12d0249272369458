"""An overloaded worker keeps what it holds: heartbeats do not stand in line with its other writes, a dead one still loses its
leases, and no more rollouts end at once than its loop carries."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import anyio
import pytest
from sqlalchemy import text

from rollyard.core.lease import Attempt
from rollyard.runs.run.lease_keeper import STILL, LeaseKeeper
from rollyard.runs.run.loop_load import LATE_S, LoopLoad
from rollyard.store import Store

pytestmark = pytest.mark.anyio
LEASE_S = 1.5


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else tmp_path / "runs.db"


async def claim_one(store):
    await store.create_run({}, id="run1")
    await store.add_attempts("run1", [Attempt(id="a0", run_id="run1", task_id="t0", number=0)])
    return await store.claim("run1", owner="busy", ttl_s=LEASE_S)


def stand_still(seconds):
    """As code that blocks the loop does."""
    time.sleep(seconds)


@asynccontextmanager
async def keeping(store, lease, *, turned_at=time.monotonic, lose=lambda _: None):
    keeper = LeaseKeeper(store, "run1", LEASE_S, held=lambda: [lease], turned_at=turned_at, lose=lose)
    async with anyio.create_task_group() as group:
        group.start_soon(keeper.run)
        yield keeper
        group.cancel_scope.cancel()


async def test_heartbeats_do_not_wait_for_the_other_writes_of_a_worker(postgres_url):
    async with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        lease = await claim_one(store)
        async with keeping(store, lease), anyio.create_task_group() as group:
            for _ in range(200):  # of which sixteen at a time get a connection
                group.start_soon(store.database.write, lambda c: c.execute(text("SELECT pg_sleep(0.4)")) and None)
            until = time.monotonic() + 3 * LEASE_S
            while time.monotonic() < until:
                assert await other.claim("run1", owner="idle", ttl_s=LEASE_S) is None
                await anyio.sleep(0.25)
            group.cancel_scope.cancel()


async def test_a_worker_whose_loop_is_held_up_keeps_its_leases(place):
    async with Store.open(place) as store:
        lease = await claim_one(store)
        turned_at = time.monotonic()
        async with keeping(store, lease, turned_at=lambda: turned_at):
            await anyio.wait_all_tasks_blocked()
            stand_still(2 * LEASE_S)
            assert await store.claim("run1", owner="idle", ttl_s=LEASE_S) is None


async def test_a_worker_whose_loop_stands_still_for_good_loses_them(place):
    lost = []
    async with Store.open(place) as store:
        lease = await claim_one(store)
        long_ago = time.monotonic() - STILL * LEASE_S - 1
        async with keeping(store, lease, turned_at=lambda: long_ago, lose=lost.extend):
            with anyio.fail_after(20):
                while (taken := await store.claim("run1", owner="idle", ttl_s=LEASE_S)) is None:
                    await anyio.sleep(0.1)
    assert (taken.owner, taken.fence, lost) == ("idle", 2, [])


async def test_a_lease_that_was_taken_over_is_told_on_the_loop(place):
    lost, on = [], []

    def lose(leases):
        lost.extend(leases)
        on.append(asyncio.get_running_loop())

    async with Store.open(place) as store:
        lease = await claim_one(store)
        await store.release(lease)
        assert await store.claim("run1", owner="idle", ttl_s=60) is not None
        async with keeping(store, lease, lose=lose):
            with anyio.fail_after(20):
                while not lost:
                    await anyio.sleep(0.05)
    assert lost[0] is lease and on[0] is asyncio.get_running_loop()


async def test_a_store_that_is_away_at_the_first_heartbeat_is_waited_for(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        lease = await claim_one(store)
        (tmp_path / "runs.db").rename(tmp_path / "away")
        async with keeping(store, lease):
            await anyio.sleep(LEASE_S)
            (tmp_path / "away").rename(tmp_path / "runs.db")
            with anyio.fail_after(20):
                while (await store.leases("run1"))[0].expires_at <= lease.expires_at:
                    await anyio.sleep(0.1)


async def test_heartbeats_go_on_when_the_process_goes_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Store.open("runs.db") as store:
        lease = await claim_one(store)
        monkeypatch.chdir("/")
        async with keeping(store, lease):
            with anyio.fail_after(20):
                while (await store.leases("run1"))[0].expires_at <= lease.expires_at:
                    await anyio.sleep(0.1)


async def test_a_worker_that_is_late_itself_is_patient_with_others(postgres_url):
    async with Store.open(postgres_url) as store:
        lease = await claim_one(store)
        async with keeping(store, lease) as keeper, Store.open(postgres_url) as other:
            assert keeper.grace_s == 0
            hold = text("SELECT pg_sleep(2) FROM (SELECT id FROM attempts WHERE id = 'a0' FOR UPDATE) held")
            await other.database.write(lambda c: c.execute(hold) and None)
            assert keeper.grace_s == STILL * LEASE_S


async def test_few_end_at_once_while_the_loop_is_late_and_more_once_it_keeps_up():
    load, ending, most = LoopLoad(cores=2, count_running=lambda: 1, count_workers=lambda: 1), 0, []

    async def end():
        nonlocal ending
        async with load.ending:
            ending += 1
            most.append(ending)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(end)
        await anyio.wait_all_tasks_blocked()
        load.note(LATE_S + 0.1)
        await anyio.wait_all_tasks_blocked()
        assert max(most) == 4
        for _ in range(3):
            load.note(0.0)
            await anyio.wait_all_tasks_blocked()
        assert max(most) == 16
        load.note(LATE_S + 0.1)
        assert load.ending.total_tokens == 8
        group.cancel_scope.cancel()


async def test_a_late_loop_takes_on_no_more_unless_it_has_nothing_to_do():
    load = LoopLoad(cores=2)
    load.note(LATE_S + 0.1)
    with anyio.fail_after(5):
        await load.wait_until_calm(lambda: False)
    with anyio.move_on_after(0.5) as waited:
        await load.wait_until_calm(lambda: True)
    assert waited.cancelled_caught
