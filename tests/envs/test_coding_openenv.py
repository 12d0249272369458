"""`rollyard serve env coding` driven by OpenEnv's own client, asynchronous and blocking: a step is a rollout, or a model call."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import pytest

from tests.envs.test_real_openenv import python_with_openenv

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASKS = [
    {"id": "other", "instruction": "do nothing", "verify": ["false"]},
    {"id": "hello", "instruction": "write hello.txt", "verify": ["test -f hello.txt"]},
]
SCRIPT = "steps:\n  - shell: echo hi > hello.txt\n  - text: done\n"
ROLLOUT_STEPS = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
url, headers = sys.argv[1], {"authorization": "Bearer " + sys.argv[2]}
told = {}
async def main():
    async with GenericEnvClient(base_url=url, headers=headers, message_timeout_s=240) as env:
        first = await env.reset(task="hello", episode_id="e1")
        done = await env.step({})
        told["first"] = [first.observation["task_id"], first.reward, first.done]
        told["done"] = [done.observation["status"], len(done.observation["turns"]), done.reward, done.done]
        state = await env.state()
        told["state"] = [state["episode_id"], state["step_count"], state["task_id"]]
        await env.reset(split="tasks", index=0)
        told["other"] = (await env.step({})).reward
asyncio.run(main())
print(json.dumps(told))
"""
CALL_STEPS = """
import json, sys
from openenv.core import GenericEnvClient
url, headers = sys.argv[1], {"authorization": "Bearer " + sys.argv[2]}
function = {"name": "shell", "arguments": json.dumps({"command": "echo hi > hello.txt"})}
call = {"id": "c1", "type": "function", "function": function}
with GenericEnvClient(base_url=url, headers=headers, message_timeout_s=240).sync() as env:
    told = []
    asked = env.reset(task="hello")
    told.append([asked.observation["messages"][-1]["role"], asked.reward, asked.done])
    try:
        env.step({"nothing": "known"})
    except RuntimeError as error:
        told.append("VALIDATION_ERROR" in str(error))
    asked = env.step({"message": {"role": "assistant", "content": None, "tool_calls": [call]}})
    told.append([asked.observation["messages"][-1]["role"], asked.reward, asked.done])
    last = env.step({"text": "done"})
    told.append([last.observation["status"], last.reward, last.done])
print(json.dumps(told))
"""


@asynccontextmanager
async def coding(tmp_path, *words):
    """The real command; gives its URL and its key."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    (tmp_path / "script.yaml").write_text(SCRIPT)
    files = ("--taskset", tmp_path / "tasks.jsonl", "--key-file", tmp_path / "key")
    command = ("-m", "rollyard", "serve", "env", "coding", "--agent", "shell-agent", "--json", *files, *words)
    program = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    try:
        ready = json.loads(await asyncio.wait_for(program.stdout.readline(), 120))
        yield ready["url"], (tmp_path / "key").read_text().strip()
    finally:
        program.terminate()
        await program.communicate()


async def told(code, *words):
    python = await asyncio.to_thread(python_with_openenv)
    program = await asyncio.create_subprocess_exec(python, "-c", code, *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(program.communicate(), 400)
    assert program.returncode == 0
    return json.loads(out)


async def test_one_step_is_one_rollout_for_their_client(tmp_path):
    async with coding(tmp_path, "--policy", f"scripted:{tmp_path}/script.yaml") as (url, key):
        assert await told(ROLLOUT_STEPS, url, key) == {
            "first": ["hello", None, False],
            "done": ["completed", 2, 1.0, True],
            "state": ["e1", 1, "hello"],
            "other": 0.0,
        }


async def test_one_step_is_one_model_call_for_their_client(tmp_path):
    async with coding(tmp_path, "--step", "call") as (url, key):
        assert await told(CALL_STEPS, url, key) == [
            ["user", None, False],
            True,
            ["tool", None, False],
            ["completed", 1.0, True],
        ]
