"""A remote task under the other Pythons that are supported: an episode, its verifier's sandbox included, in a venv of each."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.fleet_server import KEY, WORLDS, serving
from tests.plane.venvs import told, venv_or_skip

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
EPISODE = """
import asyncio, json, sys
import rollyard as ry
from rollyard import sync

async def asynchronous():
    async with ry.TaskEnv.from_json_file(sys.argv[1], "count-open") as env:
        await env.reset()
        return (await env.step({"tool": "submit_final_answer", "params": {"answer": "3"}})).reward

with sync.TaskEnv.from_json_file(sys.argv[1], "close-printer") as env:
    tools = env.reset().observation["tools"]
    env.step({"tool": "set_state", "params": {"ticket_id": 1, "state": "closed"}})
print(json.dumps([sys.version_info[:2], len(tools), env.final_reward, asyncio.run(asynchronous())]))
"""


def found(minor):
    """A Python of this version that really starts."""
    places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    for place in filter(None, places):
        if subprocess.run([str(place), "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(place)
    return pytest.skip(f"no Python 3.{minor} is installed")


def installed(minor):
    """This checkout in a venv of that Python; its packages are installed once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["fleet"]]
    packages = ["-c", str(ROOT / "constraints.txt"), *wanted]
    return venv_or_skip(f"task-env-3.{minor}", packages, ["--no-deps", "-e", str(ROOT)], python=found(minor))


@pytest.mark.parametrize("minor", [12, 13])
async def test_an_episode_runs_under_this_python(minor, tmp_path):
    """E5: Python 3.11-3.13 (3.11 is what the suite itself runs on)"""
    python = await asyncio.to_thread(installed, minor)
    (tmp_path / "episode.py").write_text(EPISODE)
    async with serving() as server:
        env = {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": server.url}
        version, tools, blocking, asynchronous = await told(
            python, tmp_path / "episode.py", str(WORLDS / "tickets" / "tasks.json"), env=env, timeout=300
        )
        assert version == [3, minor] and tools == 4 and blocking == 1.0 and asynchronous == 1.0
        assert await server.left() == []
