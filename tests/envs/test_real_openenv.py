"""The real `openenv` package, in a venv of its own: its clients drive our server, our client drives its server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rollyard
from rollyard.core.errors import EnvError, EnvUnavailable
from rollyard.envs import connect
from tests.envs.conftest import served
from tests.plane.venvs import interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
THEIR_CLIENTS = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
url = sys.argv[1]
told = {}
async def main():
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(seed=7, episode_id="ep-1")
        second = await env.step({"add": 93})
        state = await env.state()
        told["async"] = [first.observation["total"], first.reward, second.observation["total"], second.reward, second.done]
        told["state"] = [state["episode_id"], state["step_count"], state["total"]]
    async with MCPToolClient(base_url=url) as env:
        await env.reset()
        told["tools"] = [t.name for t in await env.list_tools()]
        told["called"] = await env.call_tool("double", x=21)
asyncio.run(main())
with GenericEnvClient(base_url=url).sync() as env:
    env.reset(seed=1)
    told["sync"] = env.step({"add": 1}).observation["total"]
print(json.dumps(told))
"""
THEIR_SERVER = """
import sys, uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class Say(Action):
    message: str
class Heard(Observation):
    message: str = ""
class Echo(Environment):
    def __init__(self):
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
    def reset(self, seed=None, episode_id=None, **kw):
        self._state = State(episode_id=episode_id, step_count=0)
        return Heard(message="ready", reward=0.0)
    def step(self, action, timeout_s=None, **kw):
        self._state.step_count += 1
        return Heard(message=action.message, reward=float(len(action.message)), done=action.message == "end")
    @property
    def state(self):
        return self._state
uvicorn.run(create_app(Echo, Say, Heard, env_name="echo"), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


THEIR_MCP_SERVER = """
import sys, uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
class Sums(MCPEnvironment):
    def __init__(self):
        server = FastMCP("sums")
        @server.tool
        def add(a: int, b: int) -> int:
            "Adds."
            return a + b
        @server.tool
        def fail() -> str:
            raise ValueError("no luck")
        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)
    def reset(self, seed=None, episode_id=None, **kw):
        return Observation(metadata={"ready": True})
    def _step_impl(self, action, timeout_s=None, **kw):
        return Observation(reward=1.0)
    @property
    def state(self):
        return self._state
app = create_app(Sums, CallToolAction, CallToolObservation, env_name="sums")
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
THEIR_TASK_CLIENT = """
import json, sys
from openenv.harbor.client import HarborEnv
url = sys.argv[1]
with HarborEnv(base_url=url).sync() as env:
    pass
env = HarborEnv(base_url=url)
told = {
    "splits": env.splits(),
    "num": env.num_tasks("train"),
    "one": env.get_task("train", 1).model_dump(),
    "range": [t.model_dump() for t in env.get_task_range("train", 1, 3)],
}
print(json.dumps(told))
"""


def python_with_openenv() -> str:
    return interpreter("openenv", "0.10.0")


async def test_the_real_clients_drive_our_server():
    python = await asyncio.to_thread(python_with_openenv)
    async with served() as url:
        program = await asyncio.create_subprocess_exec(python, "-c", THEIR_CLIENTS, url, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(program.communicate(), 180)
    assert program.returncode == 0
    assert json.loads(out) == {
        "async": [7, None, 100, 1.0, True],
        "state": ["ep-1", 1, 100],
        "tools": ["double", "count"],
        "called": 42,
        "sync": 2,
    }


@pytest.mark.parametrize("production", [False, True])
async def test_the_real_validator_accepts_our_server(production):
    python = await asyncio.to_thread(python_with_openenv)
    code = "import sys; from openenv.cli.__main__ import main; sys.argv = ['openenv', *sys.argv[1:]]; main()"
    async with served(production=production) as url:
        program = await asyncio.create_subprocess_exec(
            python, "-c", code, "validate", "--url", url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(program.communicate(), 180)
    assert b"Verdict: PASS" in out, out.decode()


async def test_our_client_drives_a_real_openenv_server(unused_port):
    python = await asyncio.to_thread(python_with_openenv)
    program = await asyncio.create_subprocess_exec(python, "-c", THEIR_SERVER, str(unused_port))
    try:
        await _answering(unused_port)
        url = f"http://127.0.0.1:{unused_port}"
        async with connect(url) as env:
            first = await env.reset(seed=1, episode_id="ep-9")
            assert (first.observation["message"], first.reward) == ("ready", 0.0)
            second = await env.step({"message": "hello"})
            assert (second.observation["message"], second.reward, second.terminated) == ("hello", 5.0, False)
            assert (await env.state())["episode_id"] == "ep-9"
            waiting = asyncio.create_task(_first_observation(url))  # their server holds one: ours tries again
            await asyncio.sleep(1)
            assert (await env.step({"message": "end"})).terminated
        assert await waiting == "ready"
    finally:
        program.terminate()
        await program.wait()


async def _first_observation(url):
    async with connect(url, queue_s=60.0) as env:
        return (await env.reset()).observation["message"]


async def _answering(port):
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                writer.close()
                return


@pytest.fixture
def unused_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


async def test_the_real_task_client_looks_through_our_tasks():
    """Their own client of the Task API asks for an environment named `harbor_env`."""
    python = await asyncio.to_thread(python_with_openenv)
    tasks = [{"task_id": f"t{n}", "task_name": f"t{n}", "index": n} for n in range(4)]
    async with served(name="harbor_env", splits={"train": tasks, "hard": tasks[:1]}) as url:
        program = await asyncio.create_subprocess_exec(
            *(python, "-c", THEIR_TASK_CLIENT, url), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(program.communicate(), 180)
    assert program.returncode == 0
    told = json.loads(out)
    assert told["splits"] == [{"name": "train", "type": "train"}, {"name": "hard", "type": "validation"}]
    assert told["num"] == 4
    assert told["one"]["task_id"] == "t1"
    assert [t["task_id"] for t in told["range"]] == ["t1", "t2"]


async def test_our_client_drives_a_real_mcp_environment_of_theirs(unused_port):
    python = await asyncio.to_thread(python_with_openenv)
    program = await asyncio.create_subprocess_exec(python, "-c", THEIR_MCP_SERVER, str(unused_port))
    try:
        await _answering(unused_port)
        async with connect(f"http://127.0.0.1:{unused_port}") as env:
            assert (await env.reset()).info == {"ready": True}
            assert {t["name"] for t in await env.tools()} == {"add", "fail"}
            assert await env.call("add", {"a": 20, "b": 22}) == 42
            with pytest.raises(EnvError, match="no luck"):
                await env.call("fail", {})
            stepped = await env.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 2}})
            assert stepped.observation["result"]["data"] == 3
    finally:
        program.terminate()
        await program.wait()


ADOPTED = """
import sys
sys.path += sys.argv[2].split(":")
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from fastmcp import FastMCP
from rollyard.envs.openenv_env import adopt
from rollyard.envs.server import EnvServer
import uvicorn
class Say(Action):
    message: str
class Heard(Observation):
    message: str = ""
class Echo(Environment):
    "Says it again."
    def __init__(self):
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
    def reset(self, seed=None, episode_id=None):
        self._state = State(episode_id=episode_id, step_count=10)
        return Heard(message=f"seed {seed}", metadata={"mine": 1})
    def step(self, action, timeout_s=None, **kw):
        self._state.step_count += 1
        return Heard(message=action.message, reward=True, done=action.message == "end")
    @property
    def state(self):
        return self._state
class Sums(MCPEnvironment):
    def __init__(self):
        server = FastMCP("sums")
        @server.tool
        def add(a: int, b: int) -> int:
            "Adds."
            return a + b
        @server.tool
        def fail() -> str:
            raise ValueError("no luck")
        super().__init__(server)
    async def step_async(self, action, timeout_s=None, **kw):
        seen = await super().step_async(action, timeout_s=timeout_s, **kw)
        seen.reward = 0.5
        return seen
    def reset(self, seed=None, episode_id=None, **kw):
        return Observation(metadata=kw)
    def _step_impl(self, action, timeout_s=None, **kw):
        return Observation(reward=1.0)
    @property
    def state(self):
        return State(episode_id="e", step_count=0)
makes = {"echo": adopt(Echo, Say), "sums": adopt(Sums, CallToolAction)}
uvicorn.run(EnvServer(makes[sys.argv[3]]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
THEIR_TOOL_CLIENT = """
import asyncio, json, sys
from openenv.core.mcp_client import MCPToolClient
told = {}
async def main():
    async with MCPToolClient(base_url=sys.argv[1]) as env:
        await env.reset()
        told["tools"] = sorted(t.name for t in await env.list_tools())
        told["add"] = await env.call_tool("add", a=20, b=22)
        for name in ("fail", "nothing"):
            try:
                told[name] = ["no error", await env.call_tool(name)]
            except RuntimeError as error:
                told[name] = str(error)
asyncio.run(main())
print(json.dumps(told))
"""


@asynccontextmanager
async def adopted(name, port):
    """Their environment behind our server, in their Python."""
    python = await asyncio.to_thread(python_with_openenv)
    ours = ":".join(path for path in sys.path if path.endswith("site-packages"))
    env = {**os.environ, "PYTHONPATH": str(Path(rollyard.__file__).parents[1])}
    program = await asyncio.create_subprocess_exec(python, "-c", ADOPTED, str(port), ours, name, env=env)
    try:
        await _answering(port)
        yield python, f"http://127.0.0.1:{port}"
    finally:
        program.terminate()
        await program.wait()


async def test_their_environment_runs_behind_our_server(unused_port):
    async with adopted("echo", unused_port) as (_, url), connect(url) as env:
        with pytest.raises(EnvUnavailable, match="all 1 environments are in use"):
            async with connect(url, queue_s=0.0):
                pass
        first = await env.reset(seed=3, episode_id="e3")
        assert first.observation == {"message": "seed 3", "metadata": {"mine": 1}}
        second = await env.step({"message": "end"})
        assert (second.observation["message"], second.reward, second.terminated) == ("end", 1.0, True)
        with pytest.raises(EnvError, match="action: message: Field required"):
            await env.step({})
        with pytest.raises(EnvError, match="takes no colour"):
            await env.reset(options={"colour": 1})
        state = await env.state()
        assert (state["step_count"], state["episode_id"]) == (11, "e3"), "its own"
        await env.reset()
        assert (await env.state())["episode_id"], "the session's, where it has none"


async def test_their_typed_client_raises_what_a_tool_of_theirs_raised_behind_our_server(unused_port):
    async with adopted("sums", unused_port) as (python, url):
        program = await asyncio.create_subprocess_exec(
            python, "-c", THEIR_TOOL_CLIENT, url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(program.communicate(), 180)
        async with connect(url) as env:
            assert await env.call("add", {"a": 1, "b": 2}) == 3
            stepped = await env.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 2}})
            assert (stepped.reward, stepped.observation["result"]["data"]) == (0.5, 3), (
                "a step of its own, with its reward"
            )
    told = json.loads(out)
    assert told.pop("fail").endswith("no luck") and "no tool named 'nothing'" in told.pop("nothing")
    assert told == {"tools": ["add", "fail"], "add": 42}
