"""The coding environment: a step is a real rollout, or one model call of it; `run_rollout` is an MCP tool. Rows T1 and T3."""

from __future__ import annotations

import asyncio
import json

import pytest

import rollyard as ry
from rollyard.core.errors import EnvError
from rollyard.core.message import Message, Text
from rollyard.envs import connect
from rollyard.runs.coding_env import coding_env, splits_of
from rollyard.runs.coding_request import CodingOptions
from rollyard.tools import RemoteTools
from tests.envs.conftest import served
from tests.envs.test_real_mcp import client_2
from tests.waiting import until

pytestmark = pytest.mark.anyio
SCRIPT = {"steps": [{"shell": "echo hi > hello.txt"}, {"text": "done"}]}
SLOW = {"steps": [{"shell": "sleep 600"}, {"text": "done"}]}
TASKS = ry.Taskset([{"id": "hello", "instruction": "write hello.txt", "verify": ["test -f hello.txt"]}, "another"])


def coding(step="rollout", script=SCRIPT, **options):
    made = CodingOptions(agent="shell-agent", policy=ry.policy.scripted(script), **options)
    return coding_env(made, TASKS, step=step)


def shell(command):
    function = {"name": "shell", "arguments": json.dumps({"command": command})}
    return {
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    }


async def test_one_step_is_one_rollout_and_a_tool_call_is_another():
    heard = []
    async with served(coding(), key="boss") as url, connect(url, key="boss") as env:
        first = await env.reset(seed=0)
        assert first.observation == {"task_id": "hello", "instruction": "write hello.txt"}
        done = await env.step({}, progress=lambda n, total, message: heard.append(message))
        assert (done.observation["status"], done.terminated, done.reward) == ("completed", True, 1.0)
        assert len(done.observation["turns"]) == 2
        assert "stage.started verify" in heard
        assert "agent.tool_call shell" in heard
        async with RemoteTools(url + "/mcp", env.agent_key, timeout_s=120) as tools:
            told = await tools.call(
                "run_rollout",
                {
                    "instruction": "write hello.txt",
                    "files": {"given.txt": "x"},
                    "setup": ["test -f given.txt"],
                    "verify": ["test -f hello.txt", "test -f absent"],
                    "collect": ["*.txt"],
                    "episode_id": "e7",
                    "labels": {"who": "me"},
                },
            )
        result = json.loads(told)
        assert (result["reward"], result["episode_id"]) == (0.5, "e7")
        assert [c["exit_code"] for c in result["setup"]] == [0]
        assert [c["exit_code"] for c in result["verify"]] == [0, 1]
        assert {"text": "hi\n"} in result["files"].values(), result["files"]


async def test_reset_chooses_a_task_by_id_place_or_instruction_and_refuses_the_rest():
    async with served(coding(), splits=splits_of(TASKS)) as url, connect(url) as env:
        second = TASKS[1].id
        assert (await env.reset(options={"task": second})).observation["task_id"] == second
        assert (await env.reset(options={"split": "tasks", "index": 1})).observation["task_id"] == second
        assert (await env.reset(seed=3)).observation["task_id"] == second
        assert (await env.reset(options={"instruction": "x", "setup": ["false"]})).observation["instruction"] == "x"
        with pytest.raises(EnvError, match="setup"):
            await env.step({})  # broken at infrastructure: no reward, an error
        for wrong in (
            {"task": "none such"},
            {"index": 2},
            {"index": True},
            {"split": "train"},
            {"colour": "red"},
            {"instruction": "x", "colour": "red"},
            {"instruction": "x", "files": [{"path": "a", "source": "/etc/passwd"}]},
            {"instruction": "x", "base_url": "http://elsewhere/v1", "model": "m"},
            {"instruction": "x", "sandbox": "docker"},
        ):
            with pytest.raises(EnvError):
                await env.reset(options=wrong)


async def test_a_server_may_let_its_clients_say_who_answers():
    async with served(coding(clients_choose=True)) as url, connect(url) as env:
        asked = {"instruction": "x", "base_url": "http://127.0.0.1:1/v1", "model": "m", "limits": {"agent": 60}}
        await env.reset(options=asked)
        with pytest.raises(EnvError, match="limits has no"):
            await env.reset(options={**asked, "limits": {"colour": 1}})


async def test_a_rollout_that_is_cancelled_over_mcp_is_over(sandboxes):
    heard = []

    async def progress(done, total, message):
        heard.append(message)

    async with (
        served(coding(script=SLOW, sandbox=sandboxes.backend), key="boss") as url,
        connect(url, key="boss") as env,
    ):
        async with client_2(url, env.agent_key) as client:
            call = asyncio.create_task(
                client.call_tool("run_rollout", {"instruction": "wait"}, progress_callback=progress)
            )
            await until(lambda: "agent.tool_call shell" in heard)
            assert await sandboxes.count() == 1
            call.cancel()
            async with asyncio.timeout(60):
                while await sandboxes.count():
                    await asyncio.sleep(0.1)


async def test_a_step_that_is_cancelled_leaves_no_sandbox(sandboxes):
    heard = []
    async with served(coding(script=SLOW, sandbox=sandboxes.backend)) as url, connect(url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({}, progress=lambda n, total, message: heard.append(message)))
        await until(lambda: "agent.tool_call shell" in heard)
        assert await env.cancel()
        with pytest.raises(EnvError, match="cancelled"):
            await step
        assert await sandboxes.count() == 0
        assert (await env.reset()).observation["task_id"] == "hello"


async def test_one_step_is_one_model_call_and_the_verifier_rewards_the_last():
    async with served(coding("call"), splits=splits_of(TASKS)) as url, connect(url) as env:
        first = await env.reset(options={"task": "hello"})
        assert first.observation["messages"][-1] == {"role": "user", "content": "write hello.txt"}
        assert [t["function"]["name"] for t in first.observation["tools"]] == ["shell"]
        assert (first.reward, first.done) == (None, False)
        assert (await env.state())["waiting"] is True
        second = await env.step(shell("echo hi > hello.txt; echo written"))
        assert second.observation["messages"][-1]["role"] == "tool"
        assert "written" in second.observation["messages"][-1]["content"]
        assert (second.reward, second.done) == (None, False)
        last = await env.step({"text": "done"})
        assert (last.reward, last.terminated) == (1.0, True)
        assert (last.observation["mode"], len(last.observation["turns"])) == ("interception_gate", 2)
        with pytest.raises(EnvError, match="reset"):
            await env.step({"text": "more"})


async def test_tokens_that_the_trainer_sampled_are_the_ones_recorded():
    async with served(coding("call", renderer="bytes")) as url, connect(url) as env:
        first = await env.reset(options={"instruction": "say hi"})
        assert first.observation["prompt_ids"]
        sampled = ry.policy.renderer("bytes").completion_of(Message("assistant", (Text("hi"),)))
        last = await env.step({"tokens": list(sampled), "logprobs": [-0.5] * len(sampled), "version": 3})
        [turn] = last.observation["turns"]
        assert (turn["completion_ids"], turn["logprobs"]) == (list(sampled), [-0.5] * len(sampled))


async def test_a_bad_answer_is_refused_and_a_better_one_taken():
    async with served(coding("call")) as url, connect(url) as env:
        await env.reset(options={"instruction": "x"})
        for wrong in ({}, {"text": "a", "message": {}}, {"tokens": [1]}, {"text": "a", "logprobs": [0.1]}, {"say": 1}):
            with pytest.raises(EnvError):
                await env.step(wrong)
        assert (await env.step({"text": "done"})).terminated


async def test_an_agent_whose_trainer_leaves_is_ended(sandboxes):
    async with served(coding("call", sandbox=sandboxes.backend)) as url:
        async with connect(url) as env:
            await env.reset(options={"instruction": "x"})
            assert await sandboxes.count() == 1
        async with asyncio.timeout(60):
            while await sandboxes.count():
                await asyncio.sleep(0.1)
        async with connect(url) as env:
            await env.reset(options={"instruction": "x"})
            await env.reset(options={"instruction": "y"})  # another episode ends the first one
            assert await sandboxes.count() == 1


class Boxes:
    """A backend of this test's own, and how many sandboxes it has open."""

    def __init__(self, backend):
        self.backend = backend

    async def count(self):
        return len(await self.backend.list())


@pytest.fixture
async def sandboxes(tmp_path):
    async with ry.sandbox.backend("local", root=tmp_path / "boxes") as backend:
        yield Boxes(backend)
