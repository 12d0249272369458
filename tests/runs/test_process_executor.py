"""Workers as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.task import Task
from rollyard.runs import RunConfig
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.executor import RunResources, executor
from tests.runs import executor_law as law

pytestmark = pytest.mark.anyio


def options(tmp_path, text, workers=2, **fields):
    script = tmp_path / f"script{len(text)}.yaml"
    script.write_text(text)
    config = RunConfig(policies={"policy": f"scripted:{script}"}, **fields)
    return {"config": config, "executor": executor("local", workers=workers)}


async def test_processes_keep_the_law(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await law.every_attempt_is_kept_once(store, options(tmp_path, law.HELLO))
        await law.leaving_early_gives_the_attempts_back(store, options(tmp_path, law.SLOW), backend)


async def test_a_worker_that_is_killed_loses_nothing(tmp_path):
    slow = "steps:\n  - shell: sleep 1; echo hello > out.txt\n  - text: done\n"
    async with ry.Store.open(tmp_path / "runs.db") as store:
        given = options(tmp_path, slow)
        async with ry.Run(law.tasks(8), agent="shell-agent", parallel=4, store=store, **given) as run:
            with anyio.fail_after(60):
                while len(owners := {lease.owner for lease in await store.leases(run.id)}) < 2:
                    await anyio.sleep(0.05)
            os.kill(int(min(owners).split("/")[1]), signal.SIGKILL)
            done = [rollout async for rollout in run]
        assert sorted(r.task.id for r in done) == [f"t{n}" for n in range(8)]
        assert {r.reward for r in done} == {1.0}
        assert await store.progress(run.id) == {"done": 8}
        assert any(a.tries > 1 for a in await store.attempts(run.id))


async def test_more_workers_than_the_machine_holds_are_refused_before_anything_starts(tmp_path):
    """Only the check is asked: so many processes would have others on this machine killed as well."""
    work = Assignment(run_id="run", config=RunConfig(parallel="auto"), tasks={}, agents={})
    async with ry.Store.open(tmp_path / "runs.db") as store:
        await executor("local", workers=1).check(work, RunResources(store, "local"))
        with pytest.raises(ConfigError, match="100000000 workers for .* cores") as refused:
            await executor("local", workers=100_000_000).check(work, RunResources(store, "local"))
    assert refused.value.hint == f"ask for at most {8 * len(os.sched_getaffinity(0))}"


def workers_of_this_process():
    found = (place.parent for place in Path("/proc/self/task").glob("*/children"))
    children = " ".join((place / "children").read_text() for place in found).split()
    return [pid for pid in children if b"process_worker" in Path("/proc", pid, "cmdline").read_bytes()]


async def test_no_more_workers_are_started_than_attempts_are_owed(tmp_path):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        given = options(tmp_path, law.SLOW, workers=3)
        async with ry.Run(law.tasks(1), agent="shell-agent", parallel=4, store=store, **given) as run:
            with anyio.fail_after(60):
                while not await store.leases(run.id):
                    await anyio.sleep(0.05)
            assert len(workers_of_this_process()) == 1


async def test_workers_together_have_no_more_rollouts_in_flight_than_the_run_may_have(tmp_path):
    most = 0
    async with ry.Store.open(tmp_path / "runs.db") as store:
        given = options(tmp_path, "steps:\n  - sleep: 1\n  - text: done\n")
        async with ry.Run(law.tasks(8), agent="shell-agent", parallel=3, store=store, **given) as run:
            with anyio.fail_after(120):
                while await store.progress(run.id) != {"done": 8}:
                    most = max(most, len(await store.leases(run.id)))
                    await anyio.sleep(0.05)
    assert most == 3


@pytest.mark.slow
async def test_workers_end_with_their_driver(tmp_path, backend):
    given = tmp_path / "slow.yaml"
    given.write_text(law.SLOW)
    store = tmp_path / "runs.db"
    (tmp_path / "tasks.jsonl").write_text('{"id": "t0", "instruction": "x"}\n')
    command = [sys.executable, "-m", "rollyard", "run", str(tmp_path / "tasks.jsonl"), "--agent", "shell-agent"]
    command += ["--policy", f"scripted:{given}", "--workers", "1", "--store", str(store), "--display", "none"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        with anyio.fail_after(120):
            while not store.exists():
                await anyio.sleep(0.1)
            async with ry.Store.open(store) as kept:
                while not (held := await leases(kept)):
                    await anyio.sleep(0.1)
                pid = int(held[0].owner.split("/")[1])
                assert pid != driver.pid
                driver.kill()
                while Path(f"/proc/{pid}").exists():
                    await anyio.sleep(0.1)
                (run,) = await kept.list_runs()
                assert await kept.progress(run.id) == {"owed": 1}
                assert await backend.list({"rollyard.run": run.id}) == []


async def leases(store):
    return [lease for run in await store.list_runs() for lease in await store.leases(run.id)]


async def test_a_verifier_of_an_importable_module_travels_and_a_closure_is_refused(tmp_path, monkeypatch):
    """From the caller's own import path, which a worker takes over."""
    (tmp_path / "half_a_point.py").write_text("def check(sandbox, rollout):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    module_check = import_module("half_a_point").check
    given = options(tmp_path, law.HELLO, workers=1)
    task = [Task(id="t0", instruction="x")]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        async with ry.Run(task, agent="shell-agent", store=store, verifier=module_check, **given) as run:
            assert [r.reward async for r in run] == [0.5]
        with pytest.raises(Unsupported, match="cannot go to another process"):
            async with ry.Run(task, agent="shell-agent", store=store, verifier=lambda sandbox, rollout: 1.0, **given):
                pass


async def test_a_worker_that_cannot_work_says_why(tmp_path):
    given = options(tmp_path, "steps: 3\n", workers=1)
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigError, match="a worker gave up: .*steps"):
            async with ry.Run(law.tasks(1), agent="shell-agent", store=store, **given) as run:
                assert [r async for r in run] == []


async def test_a_run_of_which_nothing_can_be_done_uses_up_no_attempt(tmp_path):
    given = options(tmp_path, law.HELLO, snapshot_every=1)
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigError, match="a worker gave up: .* none is read here"):
            async with ry.Run(law.tasks(2), agent="nop", store=store, **given) as run:
                assert [r async for r in run] == []
        assert await store.progress(run.id) == {"owed": 2}


def test_a_run_whose_workers_all_die_at_once_says_so_and_how_to_go_on(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'rollyard.runs.run.process_worker' in sys.orig_argv:\n    os._exit(7)\n"
    )
    (tmp_path / "script.yaml").write_text(law.HELLO)
    (tmp_path / "tasks.jsonl").write_text('{"id": "t0", "instruction": "x"}\n{"id": "t1", "instruction": "x"}\n')
    asked = ["run", "tasks.jsonl", "--agent", "shell-agent", "--policy", "scripted:script.yaml", "--display", "none"]
    done = rollyard(tmp_path, *asked, "--workers", "2", "--store", "runs.db", PYTHONPATH=str(broken))
    assert done.returncode == 3
    why, command = done.stderr[done.stderr.index("rollyard: each of 2 workers ended") :].rstrip().splitlines()
    assert why.endswith("it said nothing. 0 of 2 attempts are done, 2 are owed. Go on with:")
    name, *words = command.split()
    assert (name, words[:2]) == ("rollyard", ["run", "--resume"])
    assert rollyard(tmp_path, *words, "--display", "none").returncode == 0


def rollyard(place, *words, **env):
    command = [str(Path(sys.executable).with_name("rollyard")), *words]
    return subprocess.run(
        command, cwd=place, env={**os.environ, **env}, capture_output=True, text=True, timeout=240, check=False
    )


async def test_what_processes_cannot_do_is_refused_by_name(tmp_path, backend):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigError, match="9 workers for 4 rollouts at a time"):
            async with ry.Run(law.tasks(1), agent="shell-agent", store=store, executor=executor("local", workers=9)):
                pass
        with pytest.raises(Unsupported, match="open their own sandboxes"):
            where = executor("local", workers=1)
            async with ry.Run(law.tasks(1), agent="shell-agent", store=store, sandbox=backend, executor=where):
                pass
        assert await store.list_runs() == []
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        executor("local", workers=0)
