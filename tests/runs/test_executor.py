"""The executor in this process, and the fence around the other one."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, UnknownName, Unsupported
from rollyard.core.lease import Attempt
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from tests.runs import executor_law as law

pytestmark = pytest.mark.anyio


async def test_the_local_executor_keeps_the_law(tmp_path, backend):
    hello, slow = (ry.policy.scripted(write(tmp_path, text)) for text in (law.HELLO, law.SLOW))
    async with ry.Store.open(tmp_path / "runs.db") as store:
        async with ry.Gate(hello, log=store) as gate:
            await law.every_attempt_is_kept_once(store, {"gate": gate, "sandbox": backend})
            await law.a_tree_grows_to_its_leaves(store, {"gate": gate, "sandbox": backend})
        async with ry.Gate(slow, log=store) as gate:
            await law.leaving_early_gives_the_attempts_back(store, {"gate": gate, "sandbox": backend}, backend)


def write(tmp_path, text):
    path = tmp_path / f"{abs(hash(text))}.yaml"
    path.write_text(text)
    return path


async def test_a_worker_whose_lease_was_taken_ends_its_rollout_and_commits_nothing(tmp_path, backend):
    """The zombie is stopped by its next heartbeat; whoever claimed the attempt after it is the one that is kept."""
    slow = ry.policy.scripted({"steps": [{"shell": "sleep 2; echo hello > out.txt"}, {"text": "done"}]})
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(slow, log=store) as gate:
        options = {"gate": gate, "sandbox": backend, "lease_s": 1.0}
        async with ry.Run(law.tasks(1), agent="shell-agent", parallel=1, store=store, **options) as run:
            with anyio.fail_after(60):
                while not (held := await store.leases(run.id)):
                    await anyio.sleep(0.05)
            await store.expire(held[0])  # as if the machine had been silent for too long
            done = [rollout async for rollout in run]
        assert [(r.fence, r.reward) async for r in store.rollouts(run.id)] != [(held[0].fence, 1.0)]
        (attempt,) = await store.attempts(run.id)
        assert (attempt.state, attempt.rollout_id) == ("done", done[0].id)
        assert attempt.tries > held[0].attempt.tries


async def test_a_policys_bound_holds_however_many_slots_there_are(tmp_path, backend):
    most = {"now": 0, "seen": 0}

    async def answering(call):
        most["now"] += 1
        most["seen"] = max(most["seen"], most["now"])
        await anyio.sleep(0.2)
        most["now"] -= 1
        return "done"

    policy = ry.policy.scripted(answering)
    config = RunConfig(policies={"small": "x:y"}, concurrency={"small": 2}, agents=("shell-agent",))
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(policy, log=store) as gate:
        options = {"policies": {"small": policy}, "parallel": 6, "sandbox": backend, "gate": gate}
        async with ry.Run(law.tasks(6), config=config, store=store, **options) as run:
            assert len([rollout async for rollout in run]) == 6
    assert most["seen"] == 2


async def test_an_attempt_that_takes_every_worker_with_it_is_given_up_and_the_run_ends(tmp_path, backend):
    hello = ry.policy.scripted({"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]})
    async with ry.Store.open(tmp_path / "runs.db") as store, ry.Gate(hello, log=store) as gate:
        await store.create_run({}, id="run1")
        owed = [Attempt(id=f"a{n}", run_id="run1", task_id=f"t{n}", agent="shell-agent") for n in range(2)]
        await store.add_attempts("run1", owed)
        for _ in range(12):  # as if twelve workers had died of it
            await store.expire(await store.claim("run1", owner="dead", ttl_s=1))
        options = {"gate": gate, "sandbox": backend, "resume": "run1"}
        async with ry.Run(law.tasks(2), agent="shell-agent", store=store, **options) as run:
            done = {rollout.task.id: rollout async for rollout in run}
        assert (done["t1"].status, done["t1"].reward) == ("completed", 1.0)
        poison = done["t0"]
        assert (poison.status, poison.reward, poison.failure.boundary) == ("infra_error", None, "sandbox")
        assert "given up after 12 claims" in poison.failure.message
        assert await store.progress("run1") == {"done": 1, "failed": 1}


async def test_an_executor_nobody_knows_and_one_without_its_gate_are_refused(tmp_path):
    with pytest.raises(UnknownName, match="local, ray"):
        executor("slurm")
    with pytest.raises(ConfigError, match="no option 'address'"):
        executor("local", address="auto")
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigError, match="needs a gate"):
            async with ry.Run(law.tasks(1), agent="shell-agent", store=store):
                pass
        assert await store.list_runs() == []


async def test_ray_is_given_names_not_objects(tmp_path, backend):
    pytest.importorskip("ray", reason="the package ray is not installed")
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(Unsupported, match="their own sandboxes"):
            async with ry.Run(
                law.tasks(1), agent="shell-agent", store=store, sandbox=backend, executor=executor("ray")
            ):
                pass
        assert await store.list_runs() == []


def test_ray_is_imported_only_when_it_is_chosen():
    code = (
        "import sys, rollyard.cli.run, rollyard.runs.run.drive, rollyard.runs.run.executor as e; e.executor('local');"
    )
    code += "assert 'ray' not in sys.modules and 'rollyard.runs.run.ray_executor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
