"""OpenEnv's wire where it differs from what one would write oneself: as its own clients read it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from websockets.asyncio.client import connect as dial
from websockets.asyncio.server import serve

import rollyard as ry
from rollyard.core.errors import EnvError
from rollyard.envs import connect
from tests.envs.conftest import Counter, served

pytestmark = pytest.mark.anyio


class Speaks(Counter):
    """Observations with metadata of their own, and a tool that fails."""

    async def step(self, action):
        observation = {"seen": 1, "metadata": action.get("metadata", {"own": 1, "both": "observation"})}
        return ry.StepResult(observation=observation, reward=1.0, truncated=True, info={"both": "info", "more": 2})

    def tools(self):
        @ry.tools.tool
        async def fail() -> str:
            """Fails."""
            raise ry.tools.ToolError("no luck")

        return [*super().tools(), fail]


async def ask(url, *frames):
    async with dial(url.replace("http", "ws") + "/ws") as socket:
        answers = []
        for kind, data in frames:
            await socket.send(json.dumps({"type": kind, "data": data}))
            answers.append(json.loads(await socket.recv())["data"])
        return answers


def rpc(name, **arguments):
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(("tool", "message"), [("fail", "no luck"), ("nothing", "no tool named 'nothing'")])
async def test_a_failed_tool_is_a_json_rpc_error_on_every_path(tool, message):
    async with served(Speaks) as url:
        (framed,) = await ask(url, ("mcp", rpc(tool)))
        async with aiohttp.ClientSession() as http, http.post(url + "/mcp", json=rpc(tool)) as response:
            posted = await response.json()
        async with dial(url.replace("http", "ws") + "/mcp") as socket:
            await socket.send(json.dumps(rpc(tool)))
            bare = json.loads(await socket.recv())
    for answer in (framed, posted, bare):
        assert (answer["id"], answer["error"]["code"], "result" in answer) == (7, -32603, False)
        assert message in answer["error"]["message"]


async def test_an_observations_own_metadata_stands_before_info():
    async with served(Speaks) as url:
        _, told, odd = await ask(url, ("reset", {}), ("step", {}), ("step", {"metadata": "words"}))
    merged = {"own": 1, "both": "observation", "more": 2, "truncated": True}
    assert told["metadata"] == told["observation"]["metadata"] == merged
    assert (odd["observation"]["metadata"], odd["metadata"]["more"]) == ("words", 2)


async def test_a_tool_call_that_is_a_step_is_counted_as_one():
    call = {"type": "call_tool", "tool_name": "double", "arguments": {"x": 2}}
    async with served(Speaks) as url:
        answers = await ask(url, ("reset", {}), ("step", call), ("step", {"type": "list_tools"}), ("state", {}))
        assert answers[1]["observation"]["result"]["data"] == 4
        assert answers[-1]["step_count"] == 1
        (plain, state) = await ask(url, ("mcp", rpc("double", x=2)), ("state", {}))
    assert (plain["result"]["data"], state["step_count"]) == (4, 0), "a call beside the steps is none"


async def test_connect_keeps_what_a_server_says_about_each_field():
    errors = [{"type": "missing", "loc": ["action", "message"], "msg": "Field required", "input": {}}]
    refused = {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}}

    async def strict(socket):
        async for _ in socket:
            await socket.send(json.dumps(refused))

    async with serve(strict, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"http://127.0.0.1:{port}") as env:
            with pytest.raises(EnvError, match=r"Invalid message \(action.message: Field required\)"):
                await env.step({})


async def test_a_cancelled_mcp_request_gets_no_reply():
    """The stream of the request ends, and nothing on it is a response."""
    headers = {"accept": "application/json, text/event-stream"}
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    Counter.cut.clear()
    async with served() as url, aiohttp.ClientSession(headers=headers) as http:
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
        async with http.post(url + "/mcp", json=hello) as response:
            named = {"mcp-session-id": response.headers["mcp-session-id"]}
        async with http.post(
            url + "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=named
        ):
            pass
        params = {"name": "count", "arguments": {"to": -1}, "_meta": {"progressToken": 1}}
        endless = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        async with http.post(url + "/mcp", json=endless, headers=named) as stream:
            async with asyncio.timeout(30):
                begun = await stream.content.readuntil(b"begun")
            cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
            async with http.post(url + "/mcp", json=cancel, headers=named) as response:
                assert response.status == 202
            async with asyncio.timeout(30):
                rest = (begun + await stream.content.read()).decode()
        params = {"name": "double", "arguments": {"x": 2}}
        after = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}
        async with http.post(url + "/mcp", json=after, headers=named) as response:
            assert '"id":3' in (await response.text()).replace(" ", "")
    told = [json.loads(line[5:]) for line in rest.splitlines() if line.startswith("data:") and line[5:].strip()]
    assert Counter.cut == ["cancelled"]
    assert [message.get("id") for message in told if "method" not in message] == []
