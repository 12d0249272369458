"""The agent's API is real MCP: the `mcp` package's own clients, 2.x here and 1.x in a venv of its own. Rows E1 and T1."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from rollyard.envs import connect
from tests.envs.conftest import Counter, served
from tests.plane.venvs import interpreter
from tests.waiting import Clock, until

pytestmark = pytest.mark.anyio
CLIENT_1 = """
import asyncio, json, sys
import anyio
from mcp import ClientSession, types
from mcp.client.streamable_http import streamablehttp_client
url, key = sys.argv[1], sys.argv[2]
headers = {"authorization": f"Bearer {key}"} if key else {}
told = {"progress": []}
async def progress(done, total, message):
    told["progress"].append([done, total, message])
async def main():
    async with streamablehttp_client(url, headers=headers) as (read, write, session_id):
        async with ClientSession(read, write) as session:
            hello = await session.initialize()
            told["server"] = hello.serverInfo.name
            told["session"] = bool(session_id())
            told["tools"] = [t.name for t in (await session.list_tools()).tools]
            told["double"] = (await session.call_tool("double", {"x": 21})).content[0].text
            told["count"] = (await session.call_tool("count", {"to": 3}, progress_callback=progress)).content[0].text
            told["reset"] = (await session.call_tool("reset", {})).isError
            begun = anyio.Event()
            async def started(done, total, message):
                begun.set()
            async with anyio.create_task_group() as group:
                async def endless():
                    try:
                        await session.call_tool("count", {"to": -1}, progress_callback=started)
                    except Exception as error:
                        told["answered"] = str(error)
                group.start_soon(endless)
                await begun.wait()
                last = session._request_id - 1
                await session.send_notification(types.ClientNotification(types.CancelledNotification(
                    method="notifications/cancelled", params=types.CancelledNotificationParams(requestId=last))))
                told["after"] = (await session.call_tool("double", {"x": 4})).content[0].text
                group.cancel_scope.cancel()
asyncio.run(main())
print(json.dumps(told))
"""


def python_with_mcp_1() -> str:
    return interpreter("mcp", "1.30.0")


def client_2(url, key=None, **more):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    http = httpx2.AsyncClient(headers=headers, timeout=60)
    return Client(streamable_http_client(url + "/mcp", http_client=http), **more)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["boss", None])
async def test_a_1x_client_initializes_lists_calls_hears_progress_and_cancels(key):
    python = await asyncio.to_thread(python_with_mcp_1)
    Counter.cut.clear()
    async with served(key=key) as url, connect(url, key=key) as env:
        program = await asyncio.create_subprocess_exec(
            *(python, "-c", CLIENT_1, url + "/mcp", env.agent_key or ""), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(program.communicate(), 180)
        told = json.loads(out)
        await until(lambda: Counter.cut == ["cancelled"])
    assert told == {
        "after": "8",
        "server": "Counter",
        "session": True,
        "tools": ["double", "count"],
        "double": "42",
        "count": "3",
        "progress": [[1.0, 3.0, "1 of 3"], [2.0, 3.0, "2 of 3"], [3.0, 3.0, "3 of 3"]],
        "reset": True,
    }


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("key", ["boss", None])
async def test_a_2x_client_hears_progress_and_cancels(key, mode):
    Counter.cut.clear()
    heard = []

    async def progress(done, total, message):
        heard.append((done, total, message))

    async with served(key=key) as url, connect(url, key=key) as env:
        async with client_2(url, env.agent_key, mode=mode) as client:
            assert [t.name for t in (await client.list_tools()).tools] == ["double", "count"]
            counted = await client.call_tool("count", {"to": 2}, progress_callback=progress)
            assert (counted.content[0].text, heard) == ("2", [(1.0, 2.0, "1 of 2"), (2.0, 2.0, "2 of 2")])
            heard.clear()
            endless = asyncio.create_task(client.call_tool("count", {"to": -1}, progress_callback=progress))
            await until(lambda: heard)
            endless.cancel()
            await until(lambda: Counter.cut == ["cancelled"])
            assert (await client.call_tool("double", {"x": 1})).content[0].text == "2"  # the session goes on


async def test_an_mcp_session_of_infrastructure_has_an_environment_of_its_own_and_ends_it():
    Counter.closed.clear()
    async with served(capacity=1) as url:
        async with client_2(url) as client:
            assert (await client.call_tool("double", {"x": 3})).content[0].text == "6"
            async with aiohttp.ClientSession(url) as http:
                assert len(await (await http.get("/sessions")).json()) == 1
                full = await http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}})
                assert (full.status, (await full.json())["error"]["data"]["code"]) == (503, "CAPACITY_REACHED")
        await until(lambda: Counter.closed == ["closed"])
        async with aiohttp.ClientSession(url) as http:
            assert await (await http.get("/sessions")).json() == []
            gone = await http.post("/mcp", json={}, headers={"mcp-session-id": "guess"})
            assert gone.status == 404
            assert (await http.get("/mcp")).status == 400
            assert (await http.put("/mcp")).status == 405


async def test_a_tool_that_an_agent_runs_keeps_its_session_from_being_reaped():
    clock = Clock()
    Counter.closed.clear()
    async with served(key="boss", lease_s=60, reap_s=0.01, clock=clock) as url:
        async with aiohttp.ClientSession(url, headers={"authorization": "Bearer boss"}) as http:
            opened = await (await http.post("/sessions", json={})).json()
            await http.post("/sessions", json={})  # abandoned: once it is gone, both were looked at
            async with client_2(url, opened["agent_key"], mode="legacy") as client:
                begun = asyncio.Event()

                async def started(done, total, message):
                    begun.set()

                endless = asyncio.create_task(client.call_tool("count", {"to": -1}, progress_callback=started))
                await begun.wait()
                clock.now += 600  # several leases
                await until(lambda: Counter.closed)
                assert [s["session"] for s in await (await http.get("/sessions")).json()] == [opened["session"]]
                endless.cancel()
                await asyncio.gather(endless, return_exceptions=True)


async def test_a_step_and_a_call_tell_how_far_they_are_on_our_own_wire():
    class Slow(Counter):
        async def step(self, action):
            await self.report_progress(1, 2, "half")
            return await super().step(action)

    heard = []
    async with served(Slow) as url, connect(url) as env:
        await env.reset()
        await env.step({}, progress=lambda *told: heard.append(told))
        await env.call("count", {"to": 2}, progress=lambda *told: heard.append(told))
        assert heard == [(1, 2, "half"), (1, 2, "1 of 2"), (2, 2, "2 of 2")]

        def broken(*told):
            raise ValueError("the listener's own")

        with pytest.raises(ValueError, match="own"):
            await env.step({}, progress=broken)
        assert (await env.step({"add": 1})).observation == {"total": 1}
