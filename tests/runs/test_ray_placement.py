"""Two real Ray nodes, each with a home of its own: an image goes to few of them, and to a node once."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

import rollyard as ry
from rollyard.core.task import Task, VerifierSpec
from rollyard.images.store import ImageStore
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from tests.runs import executor_law as law

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray"), pytest.mark.slow]
pytest.importorskip("ray", reason="the package ray is not installed (pip install 'rollyard[ray]')")

IMAGES = tuple(f"image{number}:1" for number in range(6))
EACH = 4  # attempts of an image


async def make_images(folder) -> None:
    images = ImageStore()
    for name in IMAGES:
        upper = folder / "uppers" / name
        (upper / "opt").mkdir(parents=True)
        (upper / "opt" / "which").write_text(name)
        await images.catalog.name(await images.commit("host", {"/": upper}), [name])


async def test_an_image_goes_to_few_nodes_and_to_each_once(tmp_path, monkeypatch, postgres_url):
    from tests.servers.ray_cluster import RayCluster

    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "driver"))
    await make_images(tmp_path)
    tasks = [
        Task(
            id=f"t{number}",
            instruction="x",
            image=IMAGES[number % len(IMAGES)],  # by turns: in the order of the run every node would need each of them
            verifier=VerifierSpec(
                kind="commands", options={"commands": [f"grep -x {IMAGES[number % len(IMAGES)]} /opt/which"]}
            ),
        )
        for number in range(EACH * len(IMAGES))
    ]
    (tmp_path / "script.yaml").write_text(law.HELLO)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    with RayCluster(nodes=2, env={"ROLLYARD_HOME": str(tmp_path / "node{n}")}) as cluster:
        async with ry.Store.open(postgres_url) as store:
            options = {"config": config, "store": store, "executor": executor("ray", address=cluster.address)}
            with anyio.fail_after(400):
                async with ry.Run(tasks, agent="shell-agent", parallel=2, **options) as run:
                    rewards = Counter([rollout.reward async for rollout in run])
    assert rewards == {1.0: len(tasks)}
    fetched = [len(list((tmp_path / f"node{number}").glob("**/trees/*"))) for number in range(2)]
    print("images fetched by each node:", fetched)
    assert min(fetched) > 0  # both nodes worked
    assert len(IMAGES) <= sum(fetched) <= len(IMAGES) + 2  # at the end a node helps the other with what that is at


async def test_a_node_on_which_no_worker_can_live_does_not_end_the_run(tmp_path, postgres_url, caplog):
    from tests.servers.ray_cluster import RayCluster

    (tmp_path / "node1").write_text("a file where a worker wants a directory")
    (tmp_path / "script.yaml").write_text("steps:\n  - shell: sleep 4; echo hello > out.txt\n  - text: done\n")
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})

    with RayCluster(nodes=2, env={"ROLLYARD_HOME": str(tmp_path / "node{n}")}) as cluster:
        async with ry.Store.open(postgres_url) as store:
            options = {"config": config, "store": store, "executor": executor("ray", address=cluster.address)}
            async with ry.Run(law.tasks(10), agent="shell-agent", parallel=2, **options) as run:
                with anyio.fail_after(300):
                    rewards = [rollout.reward async for rollout in run]
    assert rewards == [1.0] * 10
    assert caplog.text.count("worker.gave_up") == 1
