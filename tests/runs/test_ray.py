"""The same rollouts on Ray: one node here, and the refusals. The drills take more nodes and kill them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from tests.runs import executor_law as law

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray")]
ray = pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node on the loopback, gone afterwards."""
    from tests.servers.ray_cluster import RayCluster

    with RayCluster(nodes=1) as made:
        yield made


def scripted(tmp_path, text):
    path = tmp_path / "script.yaml"
    path.write_text(text)
    return {"policies": {"policy": f"scripted:{path}"}}


@pytest.mark.slow
async def test_a_run_on_ray_keeps_the_law_and_is_finished_by_either_executor(tmp_path, cluster, backend):
    on_ray = executor("ray", address=cluster.address)
    async with ry.Store.open(tmp_path / "runs.db") as store:
        hello = RunConfig(**scripted(tmp_path, law.HELLO))
        await law.every_attempt_is_kept_once(store, {"config": hello, "executor": on_ray})
        await law.a_tree_grows_to_its_leaves(store, {"config": hello, "executor": on_ray})
        slow = RunConfig(**scripted(tmp_path, law.SLOW))
        await law.leaving_early_gives_the_attempts_back(store, {"config": slow, "executor": on_ray}, backend)
        (newest, *_) = await store.list_runs()
        async with ry.Gate(ry.policy.scripted({"steps": [{"shell": "echo hello > out.txt"}]}), log=store) as gate:
            options = {"gate": gate, "sandbox": backend, "store": store, "resume": newest.id}
            async with ry.Run(law.tasks(3), agent="shell-agent", **options) as run:
                assert [r.reward async for r in run] == [1.0] * 3
        again = ry.Run(law.tasks(3), agent="shell-agent", config=slow, store=store, resume=newest.id, executor=on_ray)
        async with again:  # a driver that comes back shows what is new, and here nothing is
            assert (again.owed, again.done, [r async for r in again]) == (0, 3, [])
        owners = {e.event.fields.get("sandbox_id") for e in await store.events(run_id=newest.id)}
        assert len(owners) > 3
    assert cluster.list_left_actors() == []


async def test_a_policy_that_cannot_be_opened_on_a_worker_ends_the_run_with_its_reason(tmp_path, cluster):
    nowhere = RunConfig(policies={"policy": "scripted:/nonexistent/script.yaml"})
    async with ry.Store.open(tmp_path / "runs.db") as store:
        options = {"config": nowhere, "executor": executor("ray", address=cluster.address)}
        with pytest.raises(ConfigError, match="script"):
            with anyio.fail_after(120):
                async with ry.Run(law.tasks(1), agent="shell-agent", store=store, **options) as run:
                    [rollout async for rollout in run]


def test_a_cluster_that_is_not_there_is_named(tmp_path):
    here = Path(__file__).parents[2] / "examples"
    command = [str(Path(sys.executable).with_name("rollyard")), "run", str(here / "tasks"), "--agent", "shell-agent"]
    command += ["--policy", f"scripted:{here}/scripts/bug-fix.yaml", "--executor", "ray"]
    command += ["--ray-address", "127.0.0.1:1", "--store", "runs.db"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in done.stderr


def run_on(cluster, tmp_path, *options):
    (tmp_path / "tasks.jsonl").write_text('{"id": "t0", "instruction": "x"}\n')
    (tmp_path / "script.yaml").write_text(law.SLOW)
    command = [str(Path(sys.executable).with_name("rollyard")), "run", "tasks.jsonl", "--agent", "shell-agent"]
    command += ["--policy", "scripted:script.yaml", "--executor", "ray", "--ray-address", cluster.address]
    command += ["--store", "runs.db", "--display", "plain", *options]
    return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_run_that_waits_for_nodes_which_nobody_starts_says_so(tmp_path, cluster):
    with run_on(cluster, tmp_path, "--nodes", "1") as driver:
        said = next(line for line in driver.stderr if "cluster." in line)
        driver.terminate()
    assert "cluster.no_node" in said and "is there an autoscaler?" in said


@pytest.mark.slow
def test_a_run_whose_cluster_is_gone_ends_with_the_command_that_goes_on(tmp_path):
    from tests.servers.ray_cluster import RayCluster

    ray.shutdown()  # of the cluster of the other tests: a process is in one
    with RayCluster(nodes=1) as cluster, run_on(cluster, tmp_path) as driver:
        next(line for line in driver.stderr if line.startswith("run run_"))
        ray.shutdown()  # Ray ends whoever is in a cluster without a head
        cluster.nodes[0].kill()
        said = driver.stderr.read()
    assert driver.returncode != 0, said  # Ray may end the process before it ends by itself
    assert "the head of the Ray cluster has not answered for" in said and "rollyard run --resume run_" in said


@pytest.mark.slow
async def test_without_its_driver_a_run_goes_on_to_its_end_and_leaves_no_worker(tmp_path, cluster):
    rows = [{"id": f"t{n}", "instruction": "x", "verify": ["grep -q hello out.txt"]} for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "script.yaml").write_text("steps:\n  - shell: sleep 1; echo hello > out.txt\n  - text: done\n")
    command = [str(Path(sys.executable).with_name("rollyard")), "run", "tasks.jsonl", "--agent", "shell-agent"]
    command += ["--policy", "scripted:script.yaml", "--executor", "ray", "--ray-address", cluster.address]
    command += ["--store", "runs.db", "--attempts", "3", "--parallel", "2", "--display", "plain"]
    driver = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    run_id = next(line.split()[1].rstrip(":") for line in driver.stderr if line.startswith("run run_"))
    next(line for line in driver.stderr if "reward 1" in line)
    driver.kill()
    driver.communicate()
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with anyio.fail_after(120):
            while await store.progress(run_id) != {"done": 12}:
                await anyio.sleep(0.5)
            while cluster.actors():
                await anyio.sleep(0.5)
        assert {r.reward async for r in store.rollouts(run_id)} == {1.0}


@pytest.mark.slow
async def test_a_sqlite_store_is_refused_when_there_is_more_than_one_node(tmp_path, cluster):
    second = cluster.add()
    try:
        cluster.wait(2)
        async with ry.Store.open(tmp_path / "runs.db") as store:
            config = RunConfig(**scripted(tmp_path, law.HELLO))
            options = {"config": config, "executor": executor("ray", address=cluster.address)}
            with pytest.raises(Unsupported, match="this Ray cluster has 2 nodes"):
                async with ry.Run(law.tasks(1), agent="shell-agent", store=store, **options):
                    pass
            assert await store.list_runs() == []
    finally:
        second.kill()
        cluster.nodes.remove(second)
