"""The driver of workers in other processes reads what they finished from the store."""

import asyncio

import asyncpg
import pytest

from rollyard.core.errors import ConfigError, Error, SandboxUnavailable
from rollyard.core.events import COMMITTED, Event
from rollyard.core.lease import Attempt
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.runs import RunConfig
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.distant_worker import WorkerEnd
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
            done, lease=lease, last_events=[Event(at=1.0, name=COMMITTED, run_id="run1", rollout_id="ro1")]
        )
        given = asyncio.create_task(_collect(workers))
        await asyncio.wait([given], timeout=1.5)  # longer than looks at the events wait
        await slow.commit()
        assert await asyncio.wait_for(given, 30) == ["ro1"]
        await other.close()


def at_places(store, *names):
    workers = Elsewhere(
        Assignment(run_id="run1", config=RunConfig(), tasks={}, agents={}), RunResources(store, "local")
    )
    for name in names:
        workers.note_start(name)
    return workers


def die(workers, name, times, reason="killed"):
    for _ in range(times):
        workers.note_start(name)
        workers.note_death(name, reason)


async def test_a_run_goes_on_while_one_of_its_places_can_hold_a_worker(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        workers = at_places(store, "good", "bad")
        die(workers, "bad", 50)
        assert workers.broken is None
        assert workers.pause_s("bad") == 60 and workers.pause_s("good") == 1


async def test_a_run_none_of_whose_places_can_hold_a_worker_ends_with_the_last_reason(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({}, id="run1")
        workers = at_places(store, "one", "two")
        die(workers, "one", 5)
        die(workers, "two", 4)
        assert workers.broken is None
        die(workers, "two", 1, "no disk")
        with pytest.raises(Error, match="each of 2 workers ended 5 times in a row within 15 s.*: no disk"):
            await _collect(workers)


async def test_workers_that_die_but_get_something_done_do_not_end_their_run(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        await store.create_run({}, id="run1")
        await store.add_attempts("run1", [Attempt(id=f"a{n}", run_id="run1", task_id="t", number=n) for n in range(2)])
        workers = at_places(store, "only")
        await workers.listen()
        for number in range(2):
            die(workers, "only", 4)
            lease = await store.claim("run1", owner="w", ttl_s=60)
            done = Rollout(id=f"ro{number}", task=Task(id="t", instruction="x"), run_id="run1", attempt=number)
            events = [Event(at=1.0, name=COMMITTED, run_id="run1", rollout_id=done.id)]
            await store.commit_rollout(done, lease=lease, last_events=events)
            assert (await anext(aiter(workers))).id == done.id
        assert workers.broken is None


async def test_what_another_try_may_not_meet_again_does_not_end_a_run(tmp_path):
    async with Store.open(tmp_path / "runs.db") as store:
        workers = at_places(store, "only")
        launcher = SandboxUnavailable("the sandbox launcher ended while it was asked")
        assert not workers.note_end("only", WorkerEnd(error=launcher.message, retry=launcher.retry))
        assert workers.broken is None


async def test_a_setting_that_is_wrong_at_every_place_ends_a_run_and_one_that_is_wrong_at_some_does_not(tmp_path):
    wrong = ConfigError("no such script", hint="name one")
    ended = WorkerEnd(error=wrong.message, hint=wrong.hint, retry=wrong.retry)
    async with Store.open(tmp_path / "runs.db") as store:
        workers = at_places(store, "one", "two")
        assert workers.note_end("one", ended) and workers.broken is None
        assert workers.note_end("two", ended)
        assert isinstance(workers.broken, ConfigError) and workers.broken.hint == "name one"


async def _collect(workers: DistantWorkers) -> list[str]:
    return [rollout.id async for rollout in workers]
