"""Rollouts whose tasks name images on a registry: as `docker_image`, in `FROM`, and for a service beside the agent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

import rollyard as ry
from rollyard.core.errors import ConfigError, Unsupported
from rollyard.core.sandbox import Capabilities
from rollyard.policy import scripted
from rollyard.runs.rollout.options import RolloutOptions
from rollyard.runs.rollout.provision import keeps_images
from rollyard.sandbox import backend
from tests.images.registry import Layout, python_files, shell_files, tar_of
from tests.sandbox.fault_proxy import fault_proxy

pytestmark = pytest.mark.anyio
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))
SCRIPT = "steps:\n  - shell: cat /etc/marker > /app/answer; echo $FROM_IMAGE >> /app/answer\n  - text: It is written.\n"
TEST = """#!/bin/sh
mkdir -p /logs/verifier
if grep -q 'of the registry' /app/answer && grep -q yes /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def with_python(registry, tmp_path_factory):
    """An image that agents run in."""
    layout = Layout(tmp_path_factory.mktemp("python"))
    layers = [tar_of(shell_files()), tar_of(python_files()), tar_of({"etc/marker": b"of the registry\n"})]
    layout.image(layers, config={"Env": ["PATH=/bin", "FROM_IMAGE=yes"], "WorkingDir": "/app"})
    registry.push(layout.folder, "acme/python:1")
    return "acme/python:1"


def write_task(folder, environment, **files):
    written = {
        "task.toml": f'version = "1.0"\n[environment]\nworkdir = "/app"\n{environment}\n',
        "instruction.md": "Copy /etc/marker into /app/answer.\n",
        "solution/solve.sh": "#!/bin/bash\ncat /etc/marker > /app/answer; echo $FROM_IMAGE >> /app/answer\n",
        "tests/test.sh": TEST,
        **files,
    }
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def rollyard(*words, home, cwd):
    env = {**os.environ, "ROLLYARD_HOME": str(home)}
    return await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [ROLLYARD, *words], capture_output=True, text=True, cwd=cwd, env=env, timeout=280, check=False
        )
    )


@pytest.mark.slow
async def test_a_run_pulls_the_image_that_its_task_names(registry, with_python, tmp_path):
    async with fault_proxy(f"http://{registry.host}") as (seen, address):
        host = address.removeprefix("http://")
        write_task(tmp_path / "tasks/one", f'docker_image = "{host}/{with_python}"')
        (tmp_path / "script.yaml").write_text(SCRIPT)
        words = [
            "run",
            "tasks",
            "--agent",
            "shell-agent",
            "--policy",
            "scripted:script.yaml",
            "--attempts",
            "3",
            "--json",
        ]
        refused = await rollyard(*words, home=tmp_path / "home", cwd=tmp_path)
        assert refused.returncode != 0 and seen.requests == []
        assert f"`rollyard image pull {host}/{with_python}` fetches it" in refused.stdout, refused.stdout
        done = await rollyard(*words, "--pull", host, home=tmp_path / "home", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["statuses"] == {"completed": 3}, done.stdout
        blobs = [line for line in seen.requests if "/blobs/" in line]
        assert len(blobs) == len(set(blobs)) == 4  # three attempts at once: the configuration and each layer, once


async def test_checks_builds_and_services_begin_from_a_registry(registry, tmp_path):
    clock = {"image": f"{registry.host}/acme/child:1", "command": ["sleep", "600"]}
    compose = json.dumps({"services": {"main": {"build": "."}, "clock": clock}})
    dockerfile = f"FROM {registry.host}/acme/base:1\nRUN echo of the registry > /etc/marker\n"
    environment = {"environment/Dockerfile": dockerfile, "environment/docker-compose.yaml": compose}
    write_task(tmp_path / "one", "", **environment)
    words = ["check", "tasks", "one", "-n", "1", "--json"]
    refused = await rollyard(*words, home=tmp_path / "home", cwd=tmp_path)
    assert refused.returncode == 1 and f"--pull {registry.host} lets a run do that" in refused.stdout
    done = await rollyard(*words, "--pull", registry.host, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)
    assert {proof["agent"]: proof["rewards"] for proof in check["proofs"]} == {"nop": [0.0], "oracle": [1.0]}
    names = json.loads((tmp_path / "home/names.json").read_text())
    assert set(names) == {f"{registry.host}/acme/base:1", f"{registry.host}/acme/child:1"}


async def test_a_set_pulls_nothing_but_what_the_task_that_runs_names(registry, tmp_path):
    async with fault_proxy(f"http://{registry.host}") as (seen, address):
        host = address.removeprefix("http://")
        for name, image in (("one", "base"), ("two", "child")):
            write_task(tmp_path / "tasks" / name, f'docker_image = "{host}/acme/{image}:1"')
        assert len(ry.Taskset.load(str(tmp_path / "tasks"))) == 2
        linted = await rollyard(
            "check", "tasks", "tasks", "--lint", "--pull", host, home=tmp_path / "home", cwd=tmp_path
        )
        assert linted.returncode == 0 and seen.requests == [], linted.stdout + linted.stderr
        words = ["check", "dataset", "tasks", "--filter", "one", "-n", "1", "--json", "--pull", host]
        done = await rollyard(*words, home=tmp_path / "home", cwd=tmp_path)
    asked = {line.split("/v2/")[1].partition("/")[2].partition("/")[0] for line in seen.requests if "/v2/acme/" in line}
    assert asked == {"base"}, (done.stdout, done.stderr, seen.requests)


async def test_registries_are_hosts_and_a_backend_that_opens_no_images_of_ours_refuses_them():
    with pytest.raises(ConfigError, match="allows no host"):
        RolloutOptions(pull=("a b",))
    async with backend("local") as local:
        assert keeps_images(local)
    with pytest.raises(Unsupported, match="none is pulled for it"):
        await ry.run_rollout("x", agent="nop", policy=scripted([]), sandbox=OtherImages(), pull=["docker.io"])


class OtherImages:
    """As much of a backend as is looked at before anything opens."""

    name = "other"
    capabilities = Capabilities(isolation="container", images=True)
