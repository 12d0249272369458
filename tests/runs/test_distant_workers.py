"""The driver of workers in other processes reads what they finished from the store."""

import asyncio

import asyncpg
import pytest

from rollyard.core.events import COMMITTED, Event
from rollyard.core.lease import Attempt
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.runs import RunConfig
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.distant_workers import DistantWorkers
from rollyard.runs.run.executor import RunResources
from rollyard.store import Store

pytestmark = pytest.mark.anyio


class Elsewhere(DistantWorkers):
    ended = False

    async def dismiss(self) -> None: ...


async def test_a_rollout_is_handed_out_though_the_run_is_over_and_an_earlier_event_is_still_being_written(postgres_url):
    async with Store.open(postgres_url) as store:
        await store.create_run({}, id="run1")
        await store.add_attempts("run1", [Attempt(id="a", run_id="run1", task_id="t", number=0)])
        workers = Elsewhere(
            Assignment(run_id="run1", config=RunConfig(), tasks={}, agents={}), RunResources(store, "local")
        )
        await workers.listen()
        other = await asyncpg.connect(postgres_url)
        slow = other.transaction()
        await slow.start()
        await other.execute("INSERT INTO events (at, name, fields) VALUES (1, 'of another run', '{}')")
        lease = await store.claim("run1", owner="w", ttl_s=60)
        done = Rollout(id="ro1", task=Task(id="t", instruction="x"), run_id="run1")
        await store.commit_rollout(
            done, lease=lease, told=[Event(at=1.0, name=COMMITTED, run_id="run1", rollout_id="ro1")]
        )
        given = asyncio.create_task(_collect(workers))
        await asyncio.wait([given], timeout=1.5)  # longer than looks at the events wait
        await slow.commit()
        assert await asyncio.wait_for(given, 30) == ["ro1"]
        await other.close()


async def _collect(workers: DistantWorkers) -> list[str]:
    return [rollout.id async for rollout in workers]
