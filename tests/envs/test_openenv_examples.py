"""OpenEnv's own example environments, from a checkout of its repository that ROLLYARD_OPENENV names: each behind its own server
and behind ours (one import of `server/app.py` changed), driven by our client; and the tests of its typed clients against ours."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rollyard
from rollyard.core.errors import EnvError
from rollyard.envs import connect
from tests.plane.venvs import venv_or_skip

CHECKOUT = os.environ.get("ROLLYARD_OPENENV", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="ROLLYARD_OPENENV names no checkout of OpenEnv's repository"),
]
PACKAGES = ["openenv==0.10.0", "pytest", "pytest-asyncio", "numpy"]
MOVES = {
    "echo_env": [
        {"type": "list_tools"},
        {"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "hi"}},
        {"type": "call_tool", "tool_name": "none", "arguments": {}},
    ],
    "connect4_env": [{"column": 3}, {"column": 99}],
}
VOLATILE = {"episode_id"}
IMPORT = re.compile(r"from (?:openenv\.)?core\.env_server(?:\.http_server)? import create_app\b")


@pytest.fixture(scope="session")
def python():
    return venv_or_skip("openenv-examples", PACKAGES)


@pytest.fixture(scope="session")
def trees(tmp_path_factory):
    """The checkout as it is, and with our `create_app`."""
    made = {}
    for name in ("theirs", "ours"):
        root = made[name] = tmp_path_factory.mktemp(name)
        for part in ("envs", "tests"):
            shutil.copytree(Path(CHECKOUT, part), root / part, ignore=shutil.ignore_patterns("*.gif", "*.mov", "*.png"))
    for app in (made["ours"] / "envs").glob("*/server/app.py"):
        app.write_text(IMPORT.sub("from rollyard.envs.openenv_app import create_app", app.read_text()))
    return made


def variables(root):
    """Their packages come first; what ours needs beside them is at the end."""
    (root / "sitecustomize.py").write_text(
        f"import sys; sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}"
    )
    path = os.pathsep.join(map(str, (root, root / "envs", Path(rollyard.__file__).parents[1])))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@asynccontextmanager
async def running(python, root, name):
    port = free_port()
    command = [python, "-m", "uvicorn", f"envs.{name}.server.app:app", "--port", str(port), "--log-level", "warning"]
    program = await asyncio.create_subprocess_exec(
        *command, cwd=root, env=variables(root), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(180):
            while True:
                if program.returncode is not None:
                    pytest.fail((await program.stdout.read()).decode()[-1500:])
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.2)
                else:
                    writer.close()
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        if program.returncode is None:
            program.terminate()
        await program.communicate()


async def episode(url, moves):
    """What an episode of these moves shows: observations, rewards, ends, states; refusals as such."""
    seen = []
    async with connect(url, queue_s=60.0) as env:
        for move in (None, *moves):
            try:
                result = await (env.reset(episode_id="ep-1") if move is None else env.step(move))
            except EnvError as error:
                seen.append(f"refused: {type(error).__name__}")
            else:
                seen.append([steady(result.observation), result.reward, result.done])
        seen.append(steady(await env.state()))
        seen.append(sorted(tool["name"] for tool in await env.tools()) if moves[0].get("type") else [])
    return seen


def steady(value):
    if isinstance(value, dict):
        return {name: steady(one) for name, one in value.items() if name not in VOLATILE}
    return [steady(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", MOVES)
async def test_an_example_of_theirs_shows_the_same_behind_our_server_and_behind_its_own(name, python, trees):
    shown = {}
    for whose, root in trees.items():
        async with running(python, root, name) as url:
            shown[whose] = await episode(url, MOVES[name])
    assert shown["ours"] == shown["theirs"]


def test_the_tests_of_their_typed_clients_pass_against_our_server(python, trees):
    """Among them the two that they skip: several sessions at once."""
    root = trees["ours"]
    file = root / "tests" / "envs" / "test_websockets.py"
    text = re.sub(r'@pytest\.mark\.skip\(\s*reason="[^"]*"\s*\)\s*', "", file.read_text())
    for port in set(re.findall(r"port=(\d+)", text)):
        text = text.replace(port, str(free_port()))
    file.write_text(text.replace("startup_timeout: float = 10.0", "startup_timeout: float = 180.0"))
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, cwd=root, env=variables(root), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout[-4000:]
