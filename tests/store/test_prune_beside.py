"""A pruning beside a run on PostgreSQL, where both write at the same time: neither waits for the other."""

import os

import asyncpg
import pytest

from rollyard.core.events import Event
from rollyard.core.lease import Attempt
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from tests.store.builders import full
from tests.store.killed_process import start
from tests.store.test_killed_verbs import fill

pytestmark = pytest.mark.anyio

TRANSACTIONS = 4  # of a pruning: rollouts, the rest of them, the look that finds none, the run


async def do_an_attempt(store, run_id):
    """All that a worker writes."""
    lease = await store.claim(run_id, owner="w", ttl_s=60)
    rollout_id = f"ro_{lease.attempt.id}"
    session = SessionRecord(
        rollout_id=rollout_id, key_hash=b"k", created_at=1.0, attempt_id=lease.attempt.id, fence=lease.fence
    )
    await store.save_session(session)
    for added in full(rollout_id)[1]:
        await store.commit(added.record, added.nodes, added.blobs)
    await store.heartbeats([lease], ttl_s=60)
    await store.events_under([(lease, Event(at=1.0, name="x", run_id=run_id, rollout_id=rollout_id))])
    await store.close_session(rollout_id, at=2.0)
    done = Rollout(id=rollout_id, run_id=run_id, task=Task(id="t", instruction="x"), verdict=Verdict(reward=1.0))
    await store.commit_rollout(done, lease=lease)
    assert await store.events(run_id=run_id, rollout_id=rollout_id)
    return rollout_id


async def test_a_run_goes_on_while_a_pruning_stands_still_in_any_of_its_transactions(postgres_url):
    await fill(postgres_url)
    admin = await asyncpg.connect(postgres_url)
    name = postgres_url.rpartition("/")[2]
    await admin.execute(f"ALTER DATABASE {name} SET lock_timeout = '5s'")  # a write that waits for another's lock fails
    async with Store.open(postgres_url) as store:
        await store.create_run({}, id="run_now")
        owed = [Attempt(id=f"att_{n}", run_id="run_now", task_id=f"t{n}", number=0) for n in range(TRANSACTIONS + 1)]
        await store.add_attempts("run_now", owed)
        await store.claim("run_now", owner="other", ttl_s=600)
        pruning = start("prune", postgres_url)
        made = []
        for _ in range(TRANSACTIONS):
            assert pruning.stdout.readline() == b"inside\n"
            made.append(await do_an_attempt(store, "run_now"))
            os.write(pruning.stdin.fileno(), b"\n")
        said, _ = pruning.communicate()
        assert b"runs=('run_old',)" in said and b"leases or sessions are open" in said  # bodies stay for now
        assert [one.id for one in await store.list_runs()] == ["run_now", "run_young"]
        for one in made:
            assert len((await store.get_rollout(one)).captured.records) > 1
        left = await admin.fetchval("SELECT count(*) FROM rollouts WHERE run_id = 'run_old'")
        assert (left, await admin.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = $1", name)) == (0, 0)
    await admin.close()
