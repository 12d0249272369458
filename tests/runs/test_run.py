"""Many rollouts: nothing lost, nothing twice, also when the runner is killed (S4, T8)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap

import anyio
import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, SandboxError
from rollyard.core.task import Task, VerifierSpec
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio


def tasks(count=3, **fields):
    verifier = VerifierSpec(kind="commands", options={"commands": [CHECK]})
    return [Task(id=f"t{n}", instruction="x", verifier=verifier, **fields) for n in range(count)]


async def finish(run):
    return [rollout async for rollout in run]


async def test_every_attempt_is_run_once_and_kept_with_its_calls_events_and_verdict(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        async with ry.Run(
            tasks(), agent="shell-agent", attempts=2, parallel=3, sandbox=backend, gate=gate, store=store
        ) as run:
            done = await finish(run)
        assert sorted((r.task.id, r.attempt) for r in done) == [(f"t{n}", a) for n in range(3) for a in range(2)]
        assert {r.reward for r in done} == {1.0}
        kept = await store.get_rollout(done[0].id)
        assert kept.reward == 1.0
        assert len(kept.trajectory.records) == 2
        names = {e.event.name for e in await store.events(rollout_id=done[0].id)}
        assert {"sandbox.opened", "stage.finished", "verdict", "agent.done"} <= names
        report = await ry.report(store, run.id)
        assert (report.attempts, report.scored, report.lines[0].reward.value) == (6, 6, 1.0)


async def test_a_failure_that_may_be_retried_is_tried_again_and_only_the_last_is_kept(tmp_path, backend):
    broken = {"left": 1}

    async def flaky(sandbox, rollout):
        if broken["left"]:
            broken["left"] -= 1
            raise SandboxError("lost")

    from rollyard.runs.rollout.plan import Hooks

    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        async with ry.Run(
            tasks(1), agent="shell-agent", sandbox=backend, gate=gate, store=store, hooks=Hooks((flaky,)), retries=1
        ) as run:
            (done,) = await finish(run)
        assert (done.status, done.reward) == ("completed", 1.0)
        (attempt,) = await store.attempts(run.id)
        assert (attempt.tries, attempt.state) == (2, "done")


async def test_leaving_early_cancels_cleanly_and_the_rest_stays_owed(tmp_path, backend):
    slow = ry.policy.scripted({"steps": [{"sleep": 30}]})
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(slow, log=store) as gate:
        async with ry.Run(tasks(4), agent="shell-agent", parallel=4, sandbox=backend, gate=gate, store=store) as run:
            with anyio.fail_after(20):
                while len(await backend.list({"rollyard.run": run.id})) < 4:
                    await anyio.sleep(0.05)
        assert await backend.list({"rollyard.run": run.id}) == []
        assert await store.progress(run.id) == {"owed": 4}


async def test_an_attempt_that_was_being_claimed_when_the_run_was_cancelled_is_given_back(tmp_path, backend):
    """A write that is cancelled may be kept all the same: here the store answers late, as a busy one does."""
    claimed = anyio.Event()

    class LateStore(ry.Store):
        async def claim(self, *args, **options):
            lease = await super().claim(*args, **options)
            claimed.set()
            await asyncio.sleep(0.5)
            return lease

    async with LateStore.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        async with ry.Run(tasks(2), agent="shell-agent", sandbox=backend, gate=gate, store=store) as run:
            with anyio.fail_after(60):
                await claimed.wait()
        assert await store.progress(run.id) == {"owed": 2}


async def test_a_caller_that_reads_slower_than_a_lease_lasts_is_given_every_rollout(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        given = []
        async with ry.Run(
            tasks(6), agent="shell-agent", parallel=2, lease_s=1, sandbox=backend, gate=gate, store=store
        ) as run:
            async for rollout in run:
                given.append(rollout.task.id)
                await anyio.sleep(1.5)
        assert sorted(given) == [f"t{n}" for n in range(6)]
        assert await store.progress(run.id) == {"done": 6}


async def test_a_run_without_tasks_is_refused(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO)) as gate:
        with pytest.raises(ConfigError, match="no task matches"):
            async with ry.Run(tasks(2), filter=("zzz*",), sandbox=backend, gate=gate, store=store):
                pass


async def test_a_pair_that_does_not_fit_is_one_unscored_cell_and_the_rest_of_the_run_goes_on(tmp_path, backend):
    from rollyard.core.task import McpServer

    (plain,) = tasks(1)
    tooled = msgspec.structs.replace(plain, id="tooled", mcp=(McpServer(name="m", transport="stdio", command=("x",)),))
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        async with ry.Run([tooled, plain], agent="shell-agent", sandbox=backend, gate=gate, store=store) as run:
            done = {rollout.task.id: rollout for rollout in await finish(run)}
        assert done["t0"].reward == 1.0
        assert (done["tooled"].reward, done["tooled"].failure.cause) == (None, "Unsupported")
        assert "MCP" in done["tooled"].error
        assert await store.progress(run.id) == {"done": 2}
        with pytest.raises(ConfigError, match="MCP"):
            async with ry.Run([tooled], agent="shell-agent", sandbox=backend, gate=gate, store=store):
                pass


RUNNER = """
    import asyncio, sys, rollyard as ry
    from rollyard.core.task import Task, VerifierSpec
    async def main(db, resume):
        check = VerifierSpec(kind="commands", options={"commands": ["sleep 0.2; test -f out.txt"]})
        tasks = [Task(id=f"t{n}", instruction="x", setup=("sleep 0.2",), verifier=check) for n in range(8)]
        script = {"steps": [{"shell": "sleep 0.3; touch out.txt"}, {"text": "done"}]}
        async with ry.Store.open(db) as store, ry.Gate(ry.policy.scripted(script), log=store) as gate:
            async with ry.Run(tasks, agent="shell-agent", attempts=2, parallel=8, sandbox="local", gate=gate,
                              store=store, resume=resume) as run:
                print(run.id, flush=True)
                async for rollout in run:
                    print(rollout.task.id, rollout.attempt, rollout.reward, flush=True)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
"""


async def start_runner(db, *more):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(RUNNER), db, *more, stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("kills", [(0.3, 0.9, 1.6)])
async def test_a_runner_killed_in_any_stage_resumes_with_nothing_lost_twice_or_left(tmp_path, kills, backend):
    db = str(tmp_path / "runs.db")
    process = await start_runner(db)
    run_id = (await process.stdout.readline()).decode().strip()
    for delay in kills:
        await anyio.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        await process.communicate()
        process = await start_runner(db, run_id)
        assert (await process.stdout.readline()).decode().strip() == run_id
    with anyio.fail_after(90):
        await process.stdout.read()
        assert await process.wait() == 0
    async with ry.Store.open(db) as store:
        done = [(r.task.id, r.attempt, r.reward) async for r in store.rollouts(run_id)]
        assert sorted(done) == [(f"t{n}", a, 1.0) for n in range(8) for a in range(2)]
        assert await store.progress(run_id) == {"done": 16}
        assert await store.leases(run_id) == []
    assert await backend.list({"rollyard.run": run_id}) == []
