"""Files that workers on other machines need arrive there by content, once, and tasks point to where they lie."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import rollyard as ry
from rollyard.core.agent import LayerSpec
from rollyard.images.store import ImageStore
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.config import RunConfig
from rollyard.runs.run.distant_worker import NodeAssignment
from rollyard.runs.run.ray_executor import read_secrets
from rollyard.runs.run.shipping import NodeImages, pack_work, unpack_work
from rollyard.tasks.taskset import Taskset

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples"


def a_layer(images, spec):
    """A layer as if it had been built there."""
    place = images.root / "layers" / "ly_0123456789abcdef01234567"
    programs = place / "root/opt/rollyard/0123456789ab/bin"
    programs.mkdir(parents=True)
    (programs / "agent").write_text("#!/bin/sh\necho hello\n")
    (programs / "agent").chmod(0o755)
    (programs / "again").hardlink_to(programs / "agent")
    (place / "layer.json").write_text("{}")
    images.layers.remember(spec, place.name)
    return place.name


async def test_tasks_scripts_layers_and_images_are_the_same_on_a_machine_that_has_none_of_them(tmp_path, postgres_url):
    here, there = ImageStore(tmp_path / "here"), ImageStore(tmp_path / "there")
    spec = LayerSpec(pip=("agent==1",))
    layer = a_layer(here, spec)
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "rootfs" / "hello").write_text("x" * 5_000_000)  # more than one piece
    image = await here.add(str(tmp_path / "rootfs"), names=["mine:1"])
    folder = tmp_path / "tasks"
    folder.mkdir()
    shutil.copytree(EXAMPLES / "tasks" / "file-edit", folder / "edit")
    script = tmp_path / "script.yaml"
    script.write_text("steps: []\n")
    (task,) = Taskset.load(str(folder))
    task = replace(task, image="mine:1", build=None)
    agent = replace(ry.agents.get("shell-agent"), layer=spec)
    config = RunConfig(tasks=str(folder), policies={"policy": f"scripted:{script}"}, image=str(tmp_path / "rootfs"))
    work = Assignment(run_id="run1", config=config, tasks={task.id: task}, agents={agent.name: agent})
    async with ry.Store.open(postgres_url) as store:
        shipment = await pack_work(work, store, here)
        assert await pack_work(work, store, here) == shipment  # nothing is sent twice
        shutil.rmtree(folder)
        script.unlink()
        arrived = await unpack_work(work, shipment, store, there)
        again = await unpack_work(work, shipment, store, there)
        node = NodeImages(shipment, store, there)
        assert node.held == [] and there.catalog.look_up("mine:1") is None  # an image comes when it is needed
        await node.fetch("mine:1")
        assert NodeImages(shipment, store, there).held == ["mine:1"]
    assert arrived == again
    found = arrived.tasks[task.id]
    assert found.digest == task.digest and found.source != task.source
    assert str(there.root) in found.source and (Path(found.source) / "task.toml").is_file()
    assert all(Path(tests).is_dir() for tests in found.verifier.tests) and found.verifier.tests
    assert Path(found.solution).exists()
    assert Path(arrived.config.policies["policy"].removeprefix("scripted:")).read_text() == "steps: []\n"
    assert str(there.root) in arrived.config.image and (Path(arrived.config.image) / "hello").is_file()
    assert await there.build_layer(spec) == layer  # found, not built
    program = there.layers.tree(layer) / "opt/rollyard/0123456789ab/bin/agent"
    assert program.stat().st_mode & 0o777 == 0o755 and program.stat().st_nlink == 2
    rootfs = await there.resolve("mine:1")
    assert (await there.find("mine:1")).id == image.id
    assert any((Path(lower) / "hello").stat().st_size == 5_000_000 for lower in rootfs.lowers)


async def test_a_store_of_one_machine_ships_nothing(tmp_path):
    config = RunConfig(tasks=str(tmp_path), policies={"policy": "scripted:x"})
    work = Assignment(run_id="run1", config=config, tasks={}, agents={})
    async with ry.Store.open(tmp_path / "runs.db") as store:
        shipment = await pack_work(work, store, ImageStore(tmp_path / "here"))
        assert (shipment.files, shipment.parts) == ((), {})
        assert await unpack_work(work, shipment, store, ImageStore(tmp_path / "there")) is work


@pytest.mark.adversarial
async def test_a_key_reaches_workers_as_a_named_secret_and_nothing_else(tmp_path, postgres_url, monkeypatch):
    """Whoever reads the store, the tasks and shipment that are shipped, or what Ray prints, finds no key."""
    key, password = "sk-" + "k" * 30, "hunter2hunter2"
    monkeypatch.setenv("MODEL_KEY", key)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-" + "o" * 30)
    folder = tmp_path / "file-edit"
    shutil.copytree(EXAMPLES / "tasks" / "file-edit", folder)
    task = next(iter(Taskset.load(str(folder))))
    agent = ry.agents.get("shell-agent")
    config = RunConfig(tasks=str(folder), policies={"policy": "upstream:http://127.0.0.1:1/v1"}, key_env="MODEL_KEY")
    work = Assignment(
        run_id="run1", config=config, tasks={task.id: task}, agents={agent.name: replace(agent, layer=LayerSpec())}
    )
    async with ry.Store.open(postgres_url) as store:
        shipment = await pack_work(work, store, ImageStore(tmp_path / "here"))
        pieces = [await store.get_blob(piece) for shipped in shipment.files for piece in shipped.pieces]
    posting = NodeAssignment(
        work=work,
        store=f"postgresql://ry:{password}@db/x",
        slots=1,
        shipment=shipment,
        secrets=read_secrets("MODEL_KEY"),
    )
    assert posting.secrets == {"MODEL_KEY": key}, "the variable that the policies read, and no other"
    for shipped in (pickle.dumps((work, shipment)), *pieces, repr(posting).encode(), str(posting).encode()):
        assert not [word for word in (key, "sk-ooo", password) if word.encode() in shipped]
