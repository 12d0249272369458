"""Tools on the host's side, called by a real MCP client through the gate, inside their own rollout only."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.core.call import Reply
from rollyard.core.errors import ConfigError, EnvError
from rollyard.core.message import Message, Text
from rollyard.gate import Gate
from rollyard.tools import RemoteTools, ToolContext, ToolError, Toolset, tool

pytestmark = pytest.mark.anyio


class Silent:
    async def __call__(self, call):
        return Reply(message=Message("assistant", (Text("x"),)))

    async def closed(self, rollout_id):
        return None

    async def aclose(self):
        return None


@tool
async def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@tool(name="who")
async def who_asks(context: ToolContext) -> dict:
    """Says whose rollout this is."""
    return {"rollout": context.rollout_id}


@tool
async def broken() -> str:
    """Fails."""
    raise RuntimeError("trainer secret: /home/me/run.py")


@tool
async def strict(path: str) -> str:
    """Refuses with words."""
    raise ToolError(f"no such file: {path}")


@tool(timeout_s=0.05)
async def slow() -> str:
    """Takes too long."""
    await asyncio.sleep(30)
    return "never"


def test_the_schema_is_the_signature():
    assert add.schema["properties"]["a"] == {"type": "integer"}
    assert add.schema["required"] == ["a"]
    assert add.schema["additionalProperties"] is False
    assert "context" not in who_asks.schema.get("properties", {})
    assert add.description == "Adds two numbers."


async def test_arguments_are_converted_or_refused_by_name():
    context = ToolContext(rollout_id="r")
    assert await add({"a": 2}, context) == 3
    for wrong in ({}, {"a": "2"}, {"a": 1, "c": 2}):
        with pytest.raises(ToolError, match="add"):
            await add(wrong, context)


def test_a_tool_must_be_a_named_async_function():
    with pytest.raises(ConfigError):
        tool(lambda a: a)

    async def starred(*args):
        return args

    with pytest.raises(ConfigError):
        tool(starred)
    with pytest.raises(ConfigError):
        Toolset([add, add])
    with pytest.raises(ConfigError, match="nothing"):
        Toolset([add], allow=["nothing"])


async def test_an_agent_calls_its_tools_over_mcp_on_the_gates_listener():
    """K7"""
    async with Gate(Silent(), host="127.0.0.1") as gate:
        session = await gate.open_session("r1", tools=Toolset([add, who_asks, broken, strict, slow]))
        async with RemoteTools(f"{gate.url}/mcp", session.key) as tools:
            assert [t.name for t in await tools.list()] == ["add", "who", "broken", "strict", "slow"]
            assert await tools.call("add", {"a": 2, "b": 3}) == "5"
            assert await tools.call("who", {}) == '{"rollout":"r1"}'
            with pytest.raises(EnvError, match="no such file: /x"):
                await tools.call("strict", {"path": "/x"})
            with pytest.raises(EnvError) as caught:
                await tools.call("broken", {})
            assert "secret" not in str(caught.value) and "err_" in str(caught.value)
            with pytest.raises(EnvError, match="longer than"):
                await tools.call("slow", {})
            with pytest.raises(EnvError, match="Expected `int`"):
                await tools.call("add", {"a": "x"})
        await session.close()


async def test_only_allowed_tools_exist():
    async with Gate(Silent(), host="127.0.0.1") as gate:
        session = await gate.open_session("r1", tools=Toolset([add, broken], allow=["add"]))
        async with RemoteTools(f"{gate.url}/mcp", session.key) as tools:
            assert [t.name for t in await tools.list()] == ["add"]
            with pytest.raises(EnvError, match="no tool"):
                await tools.call("broken", {})


@pytest.mark.adversarial
async def test_a_tool_runs_only_inside_its_own_rollout():
    async with Gate(Silent(), host="127.0.0.1") as gate:
        one = await gate.open_session("r1", tools=Toolset([who_asks]))
        two = await gate.open_session("r2", tools=Toolset([who_asks]))
        bare = await gate.open_session("r3")
        for session in (one, two):
            async with RemoteTools(f"{gate.url}/mcp", session.key) as tools:
                assert await tools.call("who", {}) == f'{{"rollout":"{session.rollout_id}"}}'
        for url, key in (
            (f"{gate.url}/r/r2/mcp", one.key),
            (f"{gate.url}/mcp", bare.key),
            (f"{gate.url}/mcp", "wrong-key"),
            (f"{gate.url}/mcp", None),
        ):
            with pytest.raises(EnvError):
                async with RemoteTools(url, key, timeout_s=5, pauses_s=()) as tools:
                    await tools.list()
        await one.close()
        with pytest.raises(EnvError):
            async with RemoteTools(f"{gate.url}/mcp", one.key, timeout_s=5, pauses_s=()) as tools:
                await tools.list()
