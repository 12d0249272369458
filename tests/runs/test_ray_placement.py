"""Two real Ray nodes with homes of their own: an image goes to few of them; images, layers and datasets go to each node once."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import rollyard as ry
from rollyard.core.agent import LayerSpec
from rollyard.core.task import Task, VerifierSpec
from rollyard.images.store import ImageStore
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from rollyard.tasks.dataset_registry import DatasetEntry, add_dataset
from rollyard.tasks.taskset import Taskset
from tests.runs import executor_law as law
from tests.runs.test_shipping import EXAMPLES, a_layer

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


async def test_layers_and_datasets_are_unpacked_once_on_a_node_however_many_workers_it_has(
    tmp_path, monkeypatch, postgres_url
):
    from tests.servers.ray_cluster import RayCluster

    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "driver"))
    monkeypatch.setenv("ROLLYARD_DATASETS", str(tmp_path / "datasets.toml"))
    spec = LayerSpec(pip=("agent==1",))
    a_layer(ImageStore(), spec)
    for number in range(6):
        shutil.copytree(EXAMPLES / "tasks" / "file-edit", tmp_path / "edits" / f"edit{number}")
    add_dataset(DatasetEntry(name="edits", version="1", source=str(tmp_path / "edits")))
    for node in range(2):
        log_what_is_unpacked(tmp_path / f"programs{node}")
    (tmp_path / "script.yaml").write_text(law.HELLO)
    config = RunConfig(policies={"policy": f"scripted:{tmp_path}/script.yaml"})
    env = {"ROLLYARD_HOME": str(tmp_path / "node{n}"), "PATH": f"{tmp_path}/programs{{n}}:{os.environ['PATH']}"}
    agent = replace(ry.agents.get("shell-agent"), layer=spec)
    with RayCluster(nodes=2, env=env) as cluster:
        async with ry.Store.open(postgres_url) as store:
            on_ray = executor("ray", address=cluster.address, per_node=3)
            options = {"config": config, "store": store, "executor": on_ray, "parallel": 6, "attempts": 2}
            with anyio.fail_after(400):
                async with ry.Run(Taskset.load("edits@1"), agent=agent, **options) as run:
                    done = [rollout async for rollout in run]
    assert [rollout.failure for rollout in done] == [None] * 12
    for node in range(2):
        unpacked = Counter((tmp_path / f"programs{node}" / "unpacked").read_text().split())
        kept = {kind: len(list((tmp_path / f"node{node}").glob(f"**/{kind}/*"))) for kind in unpacked}
        print("unpacked by node", node, dict(unpacked))
        assert unpacked == kept and {"shipped", "layers"} <= kept.keys()


def log_what_is_unpacked(programs: Path) -> None:
    """A `tar` on a slow disk, that writes down the name of the directory that it unpacks into."""
    programs.mkdir()
    (programs / "tar").write_text(
        '#!/bin/sh\nfor word; do last=$word; [ "$word" = -xpf ] && unpacks=1; done\n'
        f'[ -n "$unpacks" ] && basename "$(dirname "$last")" >> {programs}/unpacked && sleep 1\n'
        f'exec {shutil.which("tar")} "$@"\n'
    )
    (programs / "tar").chmod(0o755)


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
