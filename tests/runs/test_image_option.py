"""`image`: tasks open from the image that a run names, on every backend that has images, and whatever their own is."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import SandboxSpec
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.sandbox.local.backend import LocalBackend
from tests.runs.test_hosted_tasks import hosted_backend

pytestmark = pytest.mark.anyio
MAIN = [sys.executable, "-c", "from rollyard.cli.main import main; main()"]
SEEN = VerifierSpec(kind="commands", options={"commands": ["test -f /srv/marked"]})


async def mark(backend):
    """An image that is the host's with one file more."""
    async with backend.open(SandboxSpec(image="host")) as box:
        await box.write("/srv/marked", "yes")
        return await box.snapshot()


@pytest.mark.parametrize("name", ["local", pytest.param("e2b", marks=pytest.mark.slow)])
async def test_a_rollout_opens_from_the_image_that_is_named(name, tmp_path):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text("FROM host\nRUN false\n")
    tasks = [
        Task(id="plain", instruction="x", workdir="/work", verifier=SEEN),
        Task(id="named", instruction="x", image="no-such-image", workdir="/work", verifier=SEEN),
        Task(id="built", instruction="x", build=str(tmp_path / "environment"), workdir="/work", verifier=SEEN),
    ]
    async with hosted_backend(name, tmp_path) as backend:
        image = await mark(backend)
        for task in tasks:
            done = await ry.run_rollout(task, agent="nop", sandbox=backend, image=image)
            assert (done.failure, done.reward, done.task.image) == (None, 1.0, image), task.id
        own = await ry.run_rollout(tasks[0], agent="nop", sandbox=backend)
        assert own.reward == 0.0


class Bare(LocalBackend):
    """A backend without images."""

    name = "bare"

    @property
    def capabilities(self):
        return msgspec.structs.replace(super().capabilities, images=False)


async def test_a_backend_without_images_refuses_it_by_name(tmp_path):
    async with Bare(root=tmp_path) as backend:
        with pytest.raises(Unsupported, match="'bare' has no images, so not image='some:1'"):
            await ry.run_rollout("x", agent="nop", sandbox=backend, image="some:1")
        own = Task(id="t", instruction="x", image="some:1")
        done = await ry.run_rollout(own, agent="nop", sandbox=backend, image="host", verify="true")
        assert done.reward == 1.0
    with pytest.raises(ConfigError, match="image names nothing"):
        RolloutOptions(image="")


async def test_run_and_eval_open_from_the_image_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    async with ry.sandbox.backend("local") as backend:
        image = await mark(backend)
    row = {"id": "t", "instruction": "x", "image": "no-such-image", "verify": ["test -f /srv/marked"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "run.toml").write_text("tasks = 'tasks.jsonl'\nagents = ['nop']\n")
    for words in (["run", "tasks.jsonl", "--agent", "nop"], ["eval", "run.toml"]):
        done = subprocess.run(
            [*MAIN, *words, "--image", image, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert json.loads(done.stdout)["statuses"] == {"completed": 1}
        assert '"all_solved": 1' in done.stdout
