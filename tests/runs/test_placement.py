"""Attempts go to machines that have their images, so that few images travel; what needs GPUs goes to machines with GPUs."""

from __future__ import annotations

import anyio
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt
from rollyard.core.sandbox import Resources
from rollyard.core.task import Task, VerifierSpec
from rollyard.images.store import ImageStore
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.run.assignment import Assignment, needed_image
from rollyard.runs.run.config import RunConfig
from rollyard.runs.run.ray_executor import check_gpus, count_gpus
from rollyard.runs.run.shipping import NodeImages, pack_work
from rollyard.runs.run.worker import Worker, WorkerResources
from rollyard.sandbox.local.backend import LocalBackend
from tests.runs.conftest import HELLO

pytestmark = pytest.mark.anyio
IMAGES = ("first:1", "second:1")


async def make_work(images: ImageStore, tmp_path) -> Assignment:
    """Two images over this machine's own, and twelve tasks that need the one or the other in turn."""
    for name in IMAGES:
        upper = tmp_path / name
        (upper / "opt").mkdir(parents=True)
        (upper / "opt" / "which").write_text(name)
        image_id = await images.commit("host", {"/": upper})
        await images.catalog.name(image_id, [name])
    tasks = [
        Task(
            id=f"t{number}",
            instruction="x",
            image=IMAGES[number % 2],
            verifier=VerifierSpec(kind="commands", options={"commands": [f"grep {IMAGES[number % 2]} /opt/which"]}),
        )
        for number in range(12)
    ]
    agent = ry.agents.get("shell-agent")
    return Assignment(
        run_id="run1", config=RunConfig(), tasks={task.id: task for task in tasks}, agents={agent.name: agent}
    )


def attempts_of(work: Assignment) -> list[Attempt]:
    return [
        Attempt(
            id=new_id("att"),
            run_id=work.run_id,
            task_id=task.id,
            agent="shell-agent",
            image=needed_image(task, work.config),
        )
        for task in work.tasks.values()
    ]


async def count_fetched(tmp_path, url: str, *, by_images: bool) -> int:
    """How many images travel when two machines claim two attempts each in turn."""
    home = ImageStore(tmp_path / "home")
    work = await make_work(home, tmp_path)
    async with ry.Store.open(url) as store:
        shipment = await pack_work(work, store, home)
        await store.create_run({}, id=work.run_id)
        await store.add_attempts(work.run_id, attempts_of(work))
        machines = [NodeImages(shipment, store, ImageStore(tmp_path / f"machine{number}")) for number in range(2)]
        for turn in range(len(work.tasks)):
            machine = machines[turn // 2 % 2]
            held = machine.held if by_images else None
            lease = await store.claim(work.run_id, owner="w", ttl_s=60, images=held)
            machine.expect(lease.attempt.image)
            await machine.fetch(lease.attempt.image)
        assert await store.progress(work.run_id) == {"leased": len(work.tasks)}  # none is left out
        return sum(len(list((tmp_path / f"machine{number}" / "trees").iterdir())) for number in range(2))


@pytest.mark.parametrize(("by_images", "travel"), [(True, 2), (False, 4)])
async def test_fewer_images_travel_when_machines_prefer_what_they_have(tmp_path, postgres_url, by_images, travel):
    assert await count_fetched(tmp_path, postgres_url, by_images=by_images) == travel


async def test_two_workers_run_everything_and_fetch_images_as_they_need_them(tmp_path, postgres_url):
    home = ImageStore(tmp_path / "home")
    work = await make_work(home, tmp_path)
    rewards: list[float | None] = []

    async def keep(rollout: ry.Rollout) -> None:
        rewards.append(rollout.reward)

    async with ry.Store.open(postgres_url) as store, ry.Gate(ry.policy.scripted(HELLO), log=store) as gate:
        shipment = await pack_work(work, store, home)
        await store.create_run({}, id=work.run_id)
        await store.add_attempts(work.run_id, attempts_of(work))

        async def machine(number: int) -> None:
            async with LocalBackend(root=tmp_path / f"machine{number}") as backend:
                provision = Provision.of(backend)
                images = NodeImages(shipment, store, provision.images)
                means = WorkerResources(store, gate, backend, {}, provision, images=images)
                await Worker(work, means).run(2, keep)

        async with anyio.create_task_group() as group:
            group.start_soon(machine, 0)
            group.start_soon(machine, 1)
    assert rewards == [1.0] * 12


def test_gpus_are_those_of_the_nodes_that_rollouts_run_on():
    plain = {"NodeID": "a", "Alive": True, "Resources": {"rollyard": 1.0}}
    model = {"NodeID": "model", "Alive": True, "Resources": {"GPU": 8.0}}
    both = {"NodeID": "b", "Alive": True, "Resources": {"rollyard": 1.0, "GPU": 1.0}}
    assert count_gpus([plain, model]) == {"a": 0}
    assert count_gpus([plain, model, both]) == {"a": 0, "b": 1}
    assert count_gpus([model]) == {"model": 8}
    assert count_gpus([{**both, "Alive": False}, plain]) == {"a": 0}


def test_a_task_that_needs_more_gpus_than_any_node_has_is_refused_where_some_have_any():
    task = Task(id="big", instruction="x", resources=Resources(gpus=4))
    work = Assignment(run_id="r", config=RunConfig(), tasks={"big": task}, agents={})
    check_gpus(work, 4)
    check_gpus(work, 0)
    with pytest.raises(ConfigError, match="task 'big' needs 4 GPUs, and no node for rollouts has more than 2"):
        check_gpus(work, 2)
