"""`FleetTaskEnv`: the names and shapes that SkyRL's integration calls, against the real SDK and this project's Fleet API."""

import asyncio

import pytest

from rollyard.core.errors import EnvError
from rollyard.train.fleet_names import make_task_env
from tests.fleet_server import KEY, serving

pytest.importorskip("fleet", reason="the extra `fleet` (fleet-python) is not installed")
pytestmark = pytest.mark.anyio
CONFIG = {
    "task_key": "t",
    "env_key": "tickets",
    "prompt": "Close it.",
    "verifier_code": "def f(env, final_answer=None):\n    print('seen')\n    return 0.5",
}


async def test_blocking_and_async_methods_are_on_one_object_and_can_be_mixed():
    async with serving() as server:
        env = make_task_env(CONFIG, KEY, base_url=server.url, ttl_seconds=600, max_steps=5)
        observation = await env.reset_async()
        assert observation["prompt"] == "Close it." and observation["tools"] == env.tools.list_tools()
        call = {"tool": "get_ticket", "params": {"ticket_id": 1}, "done": False}
        blocking = await asyncio.to_thread(env.step, call)
        shown, reward, done, info = await env.step_async(call)
        assert (shown["observation"], reward, done) == (blocking[0]["observation"], None, False)
        assert info["tool_error"] is None and "Printer" in shown["observation"]
        given = await asyncio.to_thread(env.tools.call_tool, "get_ticket", {"ticket_id": 1})
        assert given == await env.tools.call_tool_async("get_ticket", {"ticket_id": 1}) == info["tool_result"]
        assert "error" in await env.tools.call_tool_async("nothing")
        assert len(env.tool_errors) == 1 and env.verifier_error is None
        looked = await env.verify_detailed_async()
        assert (looked.success, looked.result, looked.stdout, looked.error) == (True, 0.5, "seen\n", None)
        assert env.final_reward is None, "looking is no verdict"
        *_, reward, done, info = await env.step_async({"done": True})
        assert (reward, done, info["done_reason"]) == (0.5, True, "done")
        assert env.final_reward == 0.5 and env.verifier_stdout == "seen\n"
        with pytest.raises(EnvError, match="reset"):
            await env.tools.call_tool_async("get_ticket", {"ticket_id": 1})
        await asyncio.to_thread(env.close)
        assert await server.left() == []


def test_the_agents_handle_reaches_the_tools_and_nothing_else():
    env = make_task_env(CONFIG, KEY, base_url="http://127.0.0.1:9")
    assert [name for name in dir(env.tools) if not name.startswith("_")] == [
        "call_tool",
        "call_tool_async",
        "list_tools",
    ]
