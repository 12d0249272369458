"""The coding environment: one step is one real rollout, and `run_rollout` is an MCP tool. Row T1."""

from __future__ import annotations

import json

import pytest

import rollyard as ry
from rollyard.core.errors import EnvError
from rollyard.envs import connect
from rollyard.runs.coding_env import CodingEnv, CodingOptions
from rollyard.tools import RemoteTools
from tests.envs.conftest import served

pytestmark = pytest.mark.anyio
SCRIPT = {"steps": [{"shell": "echo hi > hello.txt"}, {"text": "done"}]}


def coding(**options):
    made = CodingOptions(agent="shell-agent", policy=ry.policy.scripted(SCRIPT), **options)
    return lambda: CodingEnv(made, ry.Taskset(["write hello.txt"]))


async def test_one_step_is_one_rollout_and_a_tool_call_is_another():
    async with served(coding(), key="boss") as url, connect(url, key="boss") as env:
        first = await env.reset(seed=0)
        assert first.observation["instruction"] == "write hello.txt"
        done = await env.step({})
        assert (done.observation["status"], done.terminated) == ("completed", True)
        assert done.reward is None  # nothing verifies it: unscored, not zero
        assert len(done.observation["turns"]) == 2
        with pytest.raises(EnvError, match="no task"):
            await env.reset(options={"task": "none such"})
        async with RemoteTools(url + "/mcp", env.agent_key, timeout_s=120) as tools:
            told = await tools.call(
                "run_rollout",
                {"instruction": "write hello.txt", "verify": ["test -f hello.txt", "test -f absent"]},
            )
        result = json.loads(told)
        assert result["reward"] == 0.5
        assert [c["exit_code"] for c in result["verify"]] == [0, 1]
