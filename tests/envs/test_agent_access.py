"""An agent's key opens its tools and nothing else. Row E1."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import InvalidStatus

from rollyard.core.errors import EnvError
from rollyard.envs import connect
from rollyard.tools import RemoteTools
from tests.envs.conftest import served

pytestmark = pytest.mark.anyio
INFRASTRUCTURE = [
    ("POST", "/reset"),
    ("POST", "/step"),
    ("GET", "/state"),
    ("POST", "/state"),
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("DELETE", "/sessions/es_1"),
    ("POST", "/sessions/es_1/cancel"),
    ("GET", "/metadata"),
    ("GET", "/schema"),
    ("GET", "/health"),
    ("GET", "/list_environments"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/Counter/splits"),
    ("POST", "/Counter/tasks"),
    ("POST", "/Counter/num_tasks"),
    ("POST", "/Counter/task"),
    ("POST", "/Counter/task_range"),
    ("POST", "/mcp/../reset"),
    ("POST", "/mcp/"),
]


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_a_real_mcp_client_calls_the_tools_of_its_own_session():
    async with served(key="boss") as url, connect(url, key="boss") as env:
        async with RemoteTools(url + "/mcp", env.agent_key) as tools:
            assert [t.name for t in await tools.list()] == ["double", "count"]
            assert await tools.call("double", {"x": 21}) == "42"
            for verb in ("reset", "step", "state", "close"):
                with pytest.raises(EnvError):
                    await tools.call(verb, {})


@pytest.mark.adversarial
async def test_an_agents_key_is_refused_on_every_infrastructure_route():
    async with served(key="boss") as url, connect(url, key="boss") as env:
        agent = {"authorization": f"Bearer {env.agent_key}"}
        async with aiohttp.ClientSession(headers=agent) as http:
            for method, path in INFRASTRUCTURE:
                answer = await http.request(method, url + path, json={"action": {}})
                assert answer.status in (401, 403), (method, path)
            for method in ("openenv/session/create", "openenv/session/close", "reset", "step", "state"):
                body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}
                accept = {"accept": "application/json, text/event-stream"}
                answer = await http.post(url + "/mcp", json=body, headers=accept)
                assert "session_id" not in await answer.text()
                assert answer.status >= 400 or "error" in await answer.json()
        for path, subprotocols in (("/ws", None), ("/ws", ["rollyard.v1"]), ("/mcp", None), ("/ws?session_id=x", None)):
            with pytest.raises(InvalidStatus, match="403"):
                await websocket(url.replace("http", "ws") + path, additional_headers=agent, subprotocols=subprotocols)
        with pytest.raises(EnvError, match="refuses this key"):
            async with connect(url, key=env.agent_key):
                pass


@pytest.mark.adversarial
async def test_without_the_key_nothing_but_health_answers():
    async with served(key="boss") as url, aiohttp.ClientSession() as http:
        assert (await http.get(url + "/health")).status == 200
        for method, path in [p for p in INFRASTRUCTURE if p[1] != "/health"] + [("POST", "/mcp"), ("GET", "/mcp")]:
            answer = await http.request(method, url + path, headers={"authorization": "Bearer wrong"})
            assert answer.status == 401, (method, path)


@pytest.mark.adversarial
async def test_one_agents_key_does_not_reach_anothers_mcp_session():
    async with served(key="boss") as url, connect(url, key="boss") as one, connect(url, key="boss") as two:
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "x", "version": "1"},
            },
        }
        accept = {"accept": "application/json, text/event-stream"}
        async with aiohttp.ClientSession() as http:
            begun = await http.post(url + "/mcp", json=hello, headers=accept | bearer(one.agent_key))
            session = {"mcp-session-id": begun.headers["mcp-session-id"]}
            listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
            own = await http.post(url + "/mcp", json=listing, headers=accept | session | bearer(one.agent_key))
            assert own.status == 200
            for key in (two.agent_key, "boss"):
                other = await http.post(url + "/mcp", json=listing, headers=accept | session | bearer(key))
                assert other.status == 404


@pytest.mark.adversarial
async def test_an_agents_key_ends_with_its_session():
    async with served(key="boss") as url:
        async with connect(url, key="boss") as env:
            key = env.agent_key
        async with aiohttp.ClientSession() as http:
            answer = await http.post(url + "/mcp", json={}, headers={"authorization": f"Bearer {key}"})
            assert answer.status == 401


@pytest.mark.adversarial
async def test_production_has_no_reset_step_or_state_for_anybody():
    async with served(production=True) as url, aiohttp.ClientSession() as http:
        for method, path in INFRASTRUCTURE[:4]:
            assert (await http.request(method, url + path, json={"action": {}})).status == 404
        async with websocket(url.replace("http", "ws") + "/ws") as socket:
            for frame in (
                {"type": "reset", "data": {}},
                {"type": "step", "data": {}},
                {"type": "step", "data": {"type": "list_tools"}},
                {"type": "state"},
            ):
                await socket.send(json.dumps(frame))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 10))
                assert (answer["type"], answer["data"]["code"]) == ("error", "UNKNOWN_TYPE")
        async with connect(url) as env:
            for move in (env.reset(), env.step({}), env.state()):
                with pytest.raises(EnvError, match="not offered"):
                    await move
            assert await env.call("double", {"x": 1}) == 2
