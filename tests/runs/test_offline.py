"""A machine without a network: the examples are judged all the same, and what cannot be fetched is known before the agent runs.

Each command runs in a network namespace of its own that has nothing but loopback, with an empty cache.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import rollyard as ry

ROOT = Path(__file__).parents[2]
ROLLYARD = Path(sys.executable).with_name("rollyard")
SCRIPT = f"scripted:{ROOT / 'examples' / 'scripts' / 'bug-fix.yaml'}"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not shutil.which("unshare") or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode != 0,
        reason="this machine gives no network namespace",
    ),
]


@pytest.fixture
async def offline(tmp_path):
    """`await offline(*words)`: the rollouts of `rollyard run`, and its exit code."""

    async def run(*words):
        as_user = [] if os.geteuid() == 0 else ["-r"]
        line = ["unshare", *as_user, "-n", "sh", "-c", 'ip link set lo up; exec "$0" "$@"', ROLLYARD, "run", *words]
        line += ["--policy", SCRIPT, "--store", tmp_path / "runs.db", "--retries", "0", "--json"]
        env = {**os.environ, "ROLLYARD_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
        with anyio.fail_after(280):
            done = await anyio.run_process([str(word) for word in line], env=env, cwd=tmp_path, check=False)
        assert done.stdout, done.stderr
        run_id = json.loads(done.stdout)["run_id"]
        async with ry.Store.open(tmp_path / "runs.db") as store:
            return [await store.get_rollout(row.id) async for row in store.rollouts(run_id)], done.returncode

    return run


@pytest.mark.parametrize("agent", ["oracle", "shell-agent"])
@pytest.mark.ordinary("shell-agent")
async def test_the_demos_task_is_solved_and_judged(offline, agent):
    done, code = await offline(ROOT / "examples" / "tasks" / "bug-fix", "--agent", agent)
    assert ([rollout.reward for rollout in done], code) == ([1.0], 0), done


@pytest.mark.slow
async def test_every_example_is_judged(offline):
    done, code = await offline(ROOT / "examples" / "tasks", "--agent", "oracle")
    assert ({rollout.task.id: rollout.reward for rollout in done}, code) == (
        {folder.name: 1.0 for folder in (ROOT / "examples" / "tasks").iterdir()},
        0,
    )


@pytest.mark.slow
async def test_a_tool_that_cannot_be_fetched_ends_the_rollout_before_the_agent(offline, tmp_path):
    folder = tmp_path / "task"
    shutil.copytree(ROOT / "examples" / "tasks" / "bug-fix", folder)
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("[agent]", 'verifier_layers = ["pip:pytest==9.2.0"]\n\n[agent]'))
    (done,), code = await offline(folder, "--agent", "oracle")
    assert (done.reward, done.failure.boundary, code) == (None, "verifier", 1)
    assert [stage.name for stage in done.stages] == ["install"]
    assert "the verifier's tools could not be built: pip " in done.failure.message
    assert "that pip reaches its index" in done.failure.message
