"""Small writes that come at the same time, on PostgreSQL: they share a transaction, and none suffers from its neighbours."""

import asyncio

import asyncpg
import pytest
from msgspec.structs import replace

from rollyard.core.errors import LeaseLost, SessionClosed
from rollyard.core.events import Event
from rollyard.core.lease import Attempt
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.testing.call_log import conversation
from tests.waiting import until

pytestmark = pytest.mark.anyio

MANY = 40


@pytest.fixture
async def shared(postgres_url):
    async with Store.open(postgres_url) as store:
        yield store


@pytest.fixture
async def admin(postgres_url):
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


async def open_session(store, name, lease=None):
    under = {} if lease is None else {"attempt_id": lease.attempt.id, "fence": lease.fence}
    await store.save_session(SessionRecord(rollout_id=name, key_hash=name.encode(), created_at=1.0, **under))


def commit_call(store, name):
    added = conversation(name, 1)[1][0][0]
    return store.commit(added.record, added.nodes, added.blobs)


async def claim(store, count):
    await store.create_run({}, id="run_a")
    await store.add_attempts(
        "run_a", [Attempt(id=f"a{n}", run_id="run_a", task_id=f"t{n}", number=0) for n in range(count)]
    )
    return [await store.claim("run_a", owner="w", ttl_s=60) for _ in range(count)]


def ended(lease):
    name = f"ro_{lease.attempt.id}"
    return Rollout(id=name, run_id="run_a", task=Task(id="t", instruction="x"), verdict=Verdict(reward=1.0))


async def test_writes_that_come_at_once_share_a_transaction_and_one_that_comes_alone_has_its_own(shared, admin):
    names = [f"r{n}" for n in range(MANY)]
    for name in names[:3]:
        await open_session(shared, name)
    await asyncio.gather(*(open_session(shared, name) for name in names[3:]))
    await asyncio.gather(*(commit_call(shared, name) for name in names), shared.event(Event(at=1.0, name="x")))
    transactions = "SELECT count(DISTINCT xmin::text) FROM "
    assert await admin.fetchval(f"{transactions} sessions WHERE rollout_id IN ('r0', 'r1', 'r2')") == 3
    assert await admin.fetchval(f"{transactions} sessions") <= 5
    assert await admin.fetchval(f"{transactions} (SELECT xmin FROM calls UNION SELECT xmin FROM events) AS all_of") <= 2
    assert await admin.fetchval("SELECT count(*) FROM calls") == MANY


async def test_one_that_fails_is_refused_alone(shared, admin):
    lost, kept = await claim(shared, 2)
    await shared.release(lost)
    for name in ("open", "closed"):
        await open_session(shared, name)
    await shared.close_session("closed", at=2.0)
    outcomes = await asyncio.gather(
        commit_call(shared, "open"),
        commit_call(shared, "closed"),
        open_session(shared, "late", lost),
        shared.commit_rollout(ended(lost), lease=lost),
        shared.commit_rollout(ended(kept), lease=kept),
        shared.events_under([(lost, Event(at=1.0, name="lost")), (kept, Event(at=1.0, name="kept"))]),
        shared.event(Event(at=1.0, name="x")),
        return_exceptions=True,
    )
    failed = [type(outcome) for outcome in outcomes if outcome is not None]
    assert failed == [SessionClosed, LeaseLost, LeaseLost]
    assert [row["rollout_id"] for row in await admin.fetch("SELECT rollout_id FROM calls")] == ["open"]
    assert [row["id"] for row in await admin.fetch("SELECT id FROM rollouts")] == [f"ro_{kept.attempt.id}"]
    assert await shared.progress("run_a") == {"owed": 1, "done": 1}
    assert {stored.event.name for stored in await shared.events()} <= {"x", "kept"}
    assert await admin.fetchval("SELECT count(*) FROM sessions WHERE rollout_id = 'late'") == 0


async def test_one_that_waits_for_a_lock_keeps_no_other_waiting(shared, admin):
    (lease,) = await claim(shared, 1)
    await open_session(shared, "other")
    async with asyncio.timeout(60):
        held = admin.transaction()
        await held.start()
        await admin.execute("SELECT 1 FROM attempts WHERE id = $1 FOR UPDATE", lease.attempt.id)
        works = (commit_call(shared, "other"), open_session(shared, "waits", lease))
        call, session = (asyncio.ensure_future(work) for work in works)
        await call
        for _ in range(5):  # neither is what comes later
            await asyncio.gather(*(shared.event(Event(at=1.0, name="x")) for _ in range(3)))
        assert not session.done()
        await held.rollback()
        await session


async def test_a_caller_that_gives_up_takes_nothing_from_the_others(shared, admin):
    works = [asyncio.ensure_future(shared.event(Event(at=1.0, name=f"x{n}"))) for n in range(MANY)]
    await asyncio.sleep(0)
    for work in works[::2]:
        work.cancel()
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, type(None)] * (MANY // 2)
    names = {row["name"] for row in await admin.fetch("SELECT name FROM events")}
    assert names >= {f"x{n}" for n in range(1, MANY, 2)}


async def test_a_store_that_is_closed_has_written_what_waited_for_others(postgres_url, admin):
    added = conversation("r", 1)[1][0][0]
    slow = replace(added.record, received_at=0.0, finished_at=3600.0)
    async with Store.open(postgres_url) as store:
        work = asyncio.ensure_future(store.commit(slow, added.nodes, added.blobs))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.done() and work.result() is None
    assert await admin.fetchval("SELECT count(*) FROM calls") == 1
    assert await admin.fetchval("SELECT count(*) FROM seats") == 0


async def test_a_store_is_closed_at_once_where_nobody_waits_for_its_writes(postgres_url, admin):
    async with asyncio.timeout(30), admin.transaction():  # less than a write may take
        async with Store.open(postgres_url) as store:
            await admin.execute("LOCK TABLE events IN EXCLUSIVE MODE")
            works = [asyncio.ensure_future(store.event(Event(at=1.0, name="x"))) for _ in range(3)]
            await until(lambda: is_blocked(admin))
            for work in works:
                work.cancel()


async def is_blocked(admin):
    return await admin.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")
