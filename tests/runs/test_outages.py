"""An outage of the model is never a reward: every agent, in every mode, with every fault.

The table is (agent) x (way to the model) x (fault). A model server fails from the first call on, or from the second on, or only
at the second and third. What failed has no reward, is charged to the policy (or to the gate, where `gate_url` leads nowhere) and
may run again; what healed is graded.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.agent import Addition, Agent
from rollyard.core.errors import UpstreamError
from rollyard.core.task import Task, VerifierSpec
from tests.runs.conftest import CHECK

pytestmark = pytest.mark.anyio

KEY = "sk-operator-secret-0123456789abcdef"
MODEL = "smol"
WORK = "echo hello > out.txt"
# An agent that prints what went wrong and exits 0, as aider does; it asks twice, again for as long as it is told to.
QUIET = """
import json, os, subprocess, time, urllib.request
asked = [{"role": "user", "content": "go"}]
def ask():
    for attempt in range(4):
        body = json.dumps({"model": os.environ["MODEL"], "messages": asked}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["ROLLYARD_KEY"]}
        request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=900) as answer:
                return json.loads(answer.read())["choices"][0]["message"]["content"] or ""
        except Exception as error:
            print("error:", error, flush=True)
            time.sleep(0.1)
    raise SystemExit(0)
subprocess.run(["sh", "-c", ask()])
asked.append({"role": "user", "content": "more"})
print(ask())
"""
PLAIN = Agent(
    name="quiet",
    argv=("python3", "-c", QUIET),
    env={"ROLLYARD_KEY": "{key}", "URL": "{base_url}", "MODEL": "{model}"},
    wires={"chat": Addition()},
)


class Faults:
    """A model server. `fault` is what it does to the calls that `hits` names by number; the others it answers."""

    def __init__(self) -> None:
        self.fault, self.hits, self.calls = "", range(0), 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": MODEL}]})
        body = json.loads(await request.read())
        if "Say hi." in json.dumps(body):  # the question that proves a direct route; it is no turn of the agent's
            number = self.calls + (1 if self.calls else 0)
        else:
            number = self.calls = self.calls + 1
        if number in self.hits:
            return await getattr(self, f"_{self.fault}")(request)
        return self._answer(body, request.path)

    def _answer(self, body: dict[str, Any], path: str) -> web.Response:
        shell = self.calls <= 1
        if path.endswith("/responses"):
            return web.Response(body=_responses(shell), content_type="text/event-stream")
        reply = _chat(shell, bool(body.get("tools")))
        if body.get("stream"):
            return web.Response(body=_chunks(reply), content_type="text/event-stream")
        return web.json_response(reply)

    async def _unauthorized(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"Incorrect API key provided: {KEY}"}}, status=401)

    async def _no_model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "The model `smol` does not exist."}}, status=404)

    async def _busy(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "slow down"}}, status=429)

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "the engine is dead"}}, status=500)

    async def _hang(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response()

    async def _refused(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "5000"})
        await response.prepare(request)
        await response.write(b'{"id": "r", "choices": [')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _garbage(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"<html>{not json", content_type="application/json")


def _chat(shell: bool, tools: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": WORK if shell and not tools else "done"}
    if shell and tools:
        call = {"name": "shell", "arguments": json.dumps({"command": WORK})}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"index": 0, "id": "c1", "type": "function", "function": call}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if shell and tools else "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"id": "r", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


def _chunks(reply: dict[str, Any]) -> bytes:
    choice = reply["choices"][0]
    head = {"id": "r", "object": "chat.completion.chunk", "model": MODEL}
    pieces = [
        {**head, "choices": [{"index": 0, "delta": choice["message"], "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    return b"".join(f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces) + b"data: [DONE]\n\n"


def _responses(shell: bool) -> bytes:
    raise NotImplementedError("codex is asked through the gate's own codec")


@pytest.fixture
async def server() -> AsyncIterator[Faults]:
    made = Faults()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


FAULTS = ("refused", "unauthorized", "no_model", "busy", "broken", "hang", "cut", "garbage")
WAYS = ("black_box", "transparent_proxy", "interception_gate", "direct", "gate_url")
AGENTS = {"shell-agent": "shell-agent", "quiet": PLAIN}
STATUS = {"unauthorized": 401, "no_model": 404, "busy": 429, "broken": 500, "refused": 502, "cut": 502, "garbage": 502}
WORDS = {
    "unauthorized": "Incorrect API key provided: [key]",
    "no_model": "The model `smol` does not exist.",
    "busy": "slow down",
    "broken": "the engine is dead",
}


def task(network: str | None = None) -> Task:
    judge = VerifierSpec(kind="commands", options={"commands": [CHECK]})
    return Task(id="t", instruction="go", verifier=judge, network=network)


async def attempt(backend, server: Faults, agent: Any, way: str, limit_s: float = 60) -> ry.Rollout:
    limits = ry.Limits(agent=limit_s)
    shared = {"agent": agent, "sandbox": backend, "model": MODEL, "limits": limits}
    if way == "interception_gate":
        queue = ry.policy.Queue()
        trainer = asyncio.create_task(train(queue, server))
        try:
            return await ry.run_rollout(task(), policy=queue, **shared)
        finally:
            trainer.cancel()
    given = {"base_url": server.url, "key": KEY}
    if way == "gate_url":
        policy = ry.policy.upstream(server.url, model=MODEL, key=KEY)
        async with ry.Gate(policy, host="127.0.0.1") as gate:
            return await ry.run_rollout(
                task("host"), gate=gate, gate_url=gate.url, allow_network=True, allow_unsafe=True, **shared
            )
    if way == "direct":
        return await ry.run_rollout(task(), mode="black_box", direct=True, allow_unsafe=True, **given, **shared)
    return await ry.run_rollout(task(), mode=way, **given, **shared)


async def train(queue: ry.policy.Queue, server: Faults) -> None:
    """A trainer whose engine is the same server: what the engine refuses, it hands on."""
    engine = ry.policy.upstream(server.url, model=MODEL, key=KEY)
    while batch := await queue.take():
        for held in batch:
            try:
                await held.reply(reply=await engine(held.call))
            except UpstreamError as error:
                await held.fail(str(error), status=error.status)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("begins", [1, 2])
async def test_an_outage_has_no_reward_and_is_run_again(backend, server, agent, way, fault, begins):
    server.fault, server.hits = fault, range(begins, 1000)
    done = await attempt(backend, server, AGENTS[agent], way, limit_s=4 if fault == "hang" else 60)
    assert done.failure is not None, (done.status, done.reward, done.log_tail, done.gate_log_tail)
    found = (done.reward, done.failure.boundary, done.failure.retry, done.failure.trainable, done.status)
    assert found == (None, "policy", True, False, "infra_error"), done.failure
    if fault in STATUS:
        assert done.failure.status == STATUS[fault], done.failure
    assert WORDS.get(fault, "") in done.failure.message
    assert KEY not in str(done.failure) and KEY not in done.log_tail


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_outage_that_heals_is_graded(backend, server, agent, way):
    server.fault, server.hits = "broken", range(2, 4)
    done = await attempt(backend, server, AGENTS[agent], way)
    assert (done.reward, done.failure, done.status) == (1.0, None, "completed"), (done.failure, done.log_tail)
    assert server.calls == 4
