"""Fleet jobs are in the plane's storage: whoever dies while working on one, another finishes it."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from rollyard.envs.fleet.verifier_code import Checked
from rollyard.plane.compat.fleet.job_worker import JobWorker
from rollyard.plane.compat.fleet.jobs import JobOutcome, JobRequest, Jobs
from rollyard.plane.compat.fleet.tasks import FleetTask, TaskCatalog, Tasks
from rollyard.plane.compat.fleet.verifiers import StoredVerifier, VerifierCatalog
from rollyard.plane.service.typed_records import TypedRecords
from rollyard.plane.storage.open import open_plane
from tests.plane.served import serving
from tests.plane.test_compatible_apis import SCRIPT, WORLDS
from tests.plane.test_crashes import Died, Until

pytestmark = pytest.mark.anyio
TASKS = Tasks([FleetTask(key=key, prompt=key, env_id="tickets") for key in ("a", "b")])


class Places:
    """The instances of all workers, by the label of their session."""

    def __init__(self):
        self.open, self.made = {}, 0

    async def make(self, owner, asked, request_id, labels, *, rollout_id):
        self.made += 1
        self.open[self.made] = labels
        return SimpleNamespace(id=self.made)

    async def close(self, place, reason=None):
        self.open.pop(place.id, None)

    async def close_labelled(self, owner, labels, reason):
        self.open = {name: found for name, found in self.open.items() if found != labels}


def jobs_over(store):
    verifiers = VerifierCatalog(TypedRecords(store, "fleet_verifier", StoredVerifier), TASKS.verifiers())
    return Jobs(store, TaskCatalog(TASKS, TypedRecords(store, "fleet_task", FleetTask), verifiers), runs=True)


async def succeed(attempt):
    checked = Checked(score=1.0, sha256="", seconds=0.0)
    return JobOutcome(steps=1, transcript=({"role": "assistant", "content": attempt.rollout_id},), checked=checked)


async def until_over(jobs, owner, job_id):
    async with asyncio.timeout(60):
        while not (await jobs.find(owner, job_id)).over:
            await asyncio.sleep(0.005)


@pytest.fixture
async def store(tmp_path):
    async with open_plane(str(tmp_path / "plane.db")) as (store, _):
        yield store


async def test_a_worker_that_dies_at_any_step_leaves_a_job_that_another_finishes(store):
    died = 0
    for calls in range(60):
        for after in (False, True):
            died_now, until = await die_once(store, calls, after)
            died += died_now
        if until.left >= 0:
            break
    assert died >= 12


async def die_once(store, calls, after):
    until, places, begun = Until(calls, after), Places(), []

    async def runner(attempt):
        begun.append(attempt.rollout_id)
        return await succeed(attempt)

    jobs = jobs_over(store)
    job = await jobs.create("ann", JobRequest(models=("p/m",), task_keys=("a", "b"), max_concurrent_per_model=1))
    dying = until.around(store, ("put_records", "claim_records", "get_record", "list_records", "next_due"))
    mortal = JobWorker(jobs_over(dying), until.around(places, ("make", "close")), runner, hold_s=0.02)
    first = asyncio.create_task(mortal.forever())
    over = asyncio.create_task(until_over(jobs, "ann", job.id))
    while until.left >= 0 and not over.done():
        await asyncio.sleep(0.001)
    first.cancel()
    gone = (await asyncio.gather(first, return_exceptions=True))[0]
    second = asyncio.create_task(JobWorker(jobs, places, runner).forever())
    await over
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    sessions = [kept.value for kept in await jobs.sessions.list(job.id)]
    assert [(one.status, one.score, one.error) for one in sessions] == [("completed", 1.0, None)] * 2
    assert len(begun) == len(set(begun)), "a rollout's id is used once"
    for one in sessions:
        assert (await jobs.transcripts.get("ann", one.id)).value[0]["content"].startswith(one.id)
    assert places.open == {}
    return isinstance(gone, Died) or until.left < 0, until


async def test_of_one_model_only_so_many_work_at_once_and_a_stopped_worker_gives_back_what_it_has(store):
    jobs, places, at_once, most = jobs_over(store), Places(), 0, 0
    go = asyncio.Event()

    async def runner(attempt):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            await go.wait()
            return await succeed(attempt)
        finally:
            at_once -= 1

    asked = JobRequest(models=("p/m",), task_keys=("a",), pass_k=5, max_concurrent_per_model=2)
    job = await jobs.create("ann", asked)
    first = asyncio.create_task(JobWorker(jobs, places, runner).forever())
    async with asyncio.timeout(60):
        while at_once < 2:
            await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert [kept.value.status for kept in await jobs.sessions.list(job.id)] == ["pending"] * 5 and places.open == {}
    go.set()
    second = asyncio.create_task(JobWorker(jobs, places, runner).forever())
    await until_over(jobs, "ann", job.id)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    sessions = [kept.value for kept in await jobs.sessions.list(job.id)]
    assert [one.score for one in sessions] == [1.0] * 5 and most == 2
    assert sum(one.begun for one in sessions) == 7 and not any(one.lost for one in sessions)


@pytest.mark.slow
async def test_a_server_that_was_killed_while_it_worked_on_a_job_is_followed_by_one_that_finishes_it(tmp_path):
    fleet = pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
    (tmp_path / "script.yaml").write_text(SCRIPT)
    options = ("--worlds", str(WORLDS), "--fleet-tasks", str(WORLDS / "tickets" / "tasks.json"))
    options += ("--job-policy", f"scripted:{tmp_path / 'script.yaml'}")
    async with serving(tmp_path, *options) as env:
        sdk = fleet.Fleet(api_key=env["FLEET_API_KEY"], base_url=env["FLEET_BASE_URL"])
        job = await asyncio.to_thread(sdk.create_job, models=["local/scripted"], env_key="tickets", pass_k=2)
        async with asyncio.timeout(120):
            while not any(one.status == "running" for one in await sessions_of(sdk, job.job_id)):
                await asyncio.sleep(0.1)
        env["process"].send_signal(signal.SIGKILL)
        await env["process"].wait()
    async with serving(tmp_path, *options) as env:
        sdk = fleet.Fleet(api_key=env["FLEET_API_KEY"], base_url=env["FLEET_BASE_URL"])
        async with asyncio.timeout(240):
            while (await asyncio.to_thread(sdk.get_job, job.job_id)).status != "completed":
                await asyncio.sleep(0.5)
        ended = await sessions_of(sdk, job.job_id)
        assert [one.status for one in ended] == ["completed"] * 4
        assert all(one.verifier_execution.success for one in ended)
        left = await asyncio.to_thread(sdk.instances)  # one that was being made is the sweep's
        assert [one.status for one in left if one.status != "stopped"] == []


async def sessions_of(sdk, job_id):
    listed = await asyncio.to_thread(sdk.list_job_sessions, job_id)
    return [one for group in listed.tasks for one in group.sessions]
