"""Hostile requests: never a 500, never a hang, never a session that dies of another's frame.

HTTP is fuzzed by schemathesis from the server's own description, the sockets by frames that are almost right. The ordinary run is
small; the slow one is not.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from websockets.sync.client import connect as websocket

from tests.envs.conftest import Counter, served

KINDS = ["reset", "step", "state", "tools", "call", "cancel", "open", "close", "mcp", "", "dance", "__class__"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
moves = st.dictionaries(
    st.sampled_from(["seed", "options", "episode_id", "action", "name", "arguments", "lease_s", "queue_s", "session"]),
    json_values,
    max_size=4,
)
own_frames = st.fixed_dictionaries(
    {}, optional={"id": st.text(max_size=6) | json_values, "do": st.sampled_from(KINDS) | json_values, "with": moves}
)
their_frames = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(KINDS) | json_values, "data": moves | json_values, "extra": json_values}
)
texts = st.text(max_size=60) | st.binary(max_size=60)


class Steady(Counter):
    """Says what its state is, and takes any action."""

    async def step(self, action):
        return await super().step({"add": 1})


@contextmanager
def running(**options):
    """A server in a thread of its own, for clients that block."""
    ready, end, urls = threading.Event(), threading.Event(), []

    async def serve():
        async with served(
            Steady,
            splits={"train": [{"id": 1}, {"id": 2}]},
            name="steady",
            **{"capacity": 100_000, "lease_s": 0.5, "max_lease_s": 2.0, "max_queue_s": 0.1} | options,
        ) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        end.set()
        thread.join(60)


def over_http(url: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    attacked = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        def attack(case):
            nonlocal attacked
            attacked += 1
            response = case.call(base_url=url, timeout=30)
            assert response.status_code < 500, response.text
            case.validate_response(response, checks=[status_code_conformance, response_schema_conformance])

        attack()
    assert attacked >= examples * 5


def over_sockets(url: str, examples: int) -> None:
    ws = url.replace("http", "ws")
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )

    def ask(socket, frame):
        socket.send(json.dumps(frame))
        while True:
            answer = json.loads(socket.recv(timeout=30))
            if answer.get("event") is None:
                return answer

    with websocket(f"{ws}/ws") as steady:  # a session beside the attack
        ask(steady, {"type": "reset", "data": {"seed": 5}})

        @hypothesis.given(frame=their_frames | json_values | texts)
        @settings
        def theirs(frame):
            if isinstance(frame, dict) and frame.get("type") == "close":
                return
            with websocket(f"{ws}/ws") as socket:
                text = frame if isinstance(frame, str | bytes) else json.dumps(frame)
                socket.send(text)
                assert "type" in json.loads(socket.recv(timeout=30))
                assert ask(socket, {"type": "reset", "data": {}})["type"] == "observation"

        @hypothesis.given(frames=st.lists(own_frames | json_values | texts, min_size=1, max_size=5))
        @settings
        def ours(frames):
            with websocket(f"{ws}/ws", subprotocols=["rollyard.v1"]) as socket:
                assert "session" in ask(socket, {"id": "first", "do": "open"})["ok"]
                closes = False
                for frame in frames:
                    closes = closes or (isinstance(frame, dict) and frame.get("do") == "close")
                    socket.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
                socket.send(json.dumps({"id": "last!", "do": "state"}))
                while (answer := json.loads(socket.recv(timeout=30))).get("id") != "last!":
                    pass
                assert "ok" in answer or closes or answer["error"]["code"] in ("CANCELLED", "SESSION_ERROR")

        @hypothesis.given(frame=their_frames | json_values | texts)
        @settings
        def rpc(frame):
            with websocket(f"{ws}/mcp") as socket:
                socket.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
                assert json.loads(socket.recv(timeout=30))["jsonrpc"] == "2.0"

        theirs()
        ours()
        rpc()
        assert ask(steady, {"type": "step", "data": {}})["data"]["observation"]["total"] == 6


@pytest.mark.adversarial
def test_a_few_hostile_requests_are_all_answered():
    with running() as url:
        over_http(url, 4)
        over_sockets(url, 25)
        assert requests.get(f"{url}/health", timeout=30).json()["status"] == "healthy"


@pytest.mark.slow
@pytest.mark.adversarial
@pytest.mark.parametrize("production", [False, True])
def test_many_hostile_requests_are_all_answered(production):
    with running(production=production) as url:
        over_http(url, 150)
        if not production:
            over_sockets(url, 1000)
        assert requests.get(f"{url}/health", timeout=30).json()["status"] == "healthy"
