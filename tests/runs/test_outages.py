"""An outage of the model is never a reward: every agent, in every mode, with every fault.

The table is (agent) x (way to the model) x (fault). A model server fails from the first call on, or from the second on, or only
at the second and third. What failed has no reward, is charged to the policy (or to the gate, where `gate_url` leads nowhere) and
may run again; what healed is graded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.agent import Addition, Agent
from rollyard.core.call import Reply
from rollyard.core.errors import UpstreamError
from rollyard.core.message import Message, Text
from rollyard.core.task import Task, VerifierSpec
from rollyard.wire import CODECS, route
from rollyard.wire.codec import WireRequest
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio

KEY = "sk-operator-secret-0123456789abcdef"
MODEL = "smol"
WORK = "echo hello > out.txt"
# An agent that prints what went wrong and exits 0, as aider does; it asks twice, again for as long as it is told to.
_ASKS = """
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
QUIET = Agent(
    name="quiet",
    argv=("python3", "-c", _ASKS),
    env={"ROLLYARD_KEY": "{key}", "URL": "{base_url}", "MODEL": "{model}"},
    wires={"chat": Addition()},
)


class Faults:
    """A model server. `fault` is what it does to the calls that `hits` names by number; the others it answers."""

    def __init__(self, fault: str, hits: range) -> None:
        self.fault, self.hits, self.calls = fault, hits, 0
        self.url = ""
        self._script = ry.policy.scripted(HELLO)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": MODEL}]})
        body = await request.read()
        if b"Say hi." in body:  # the question that proves a direct route; it is no turn of the agent's
            number = self.calls + (1 if self.calls else 0)
        else:
            number = self.calls = self.calls + 1
        if number in self.hits:
            return await getattr(self, f"_{self.fault}")(request)
        return await self._answer(request, body)

    async def _answer(self, request: web.Request, body: bytes) -> web.Response:
        """In the dialect it was asked in, by script."""
        found = route(request.method, request.path)
        assert found is not None
        codec = CODECS[found.dialect]
        asked = WireRequest(call_id="c", rollout_id="r", body=body, headers={}, model=found.model, stream=found.stream)
        call = codec.decode(asked)
        if call.tools:
            reply = await self._script(call)
        else:
            reply = Reply(message=Message("assistant", (Text(WORK if self.calls <= 1 else "done"),)), model=MODEL)
        if call.stream:
            text = b"".join(codec.stream(call, reply))
            return web.Response(body=text, headers={"Content-Type": codec.stream_type(call)})
        return web.Response(body=codec.encode(call, reply), content_type="application/json")

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


@asynccontextmanager
async def serve(fault: str, hits: range) -> AsyncIterator[Faults]:
    made = Faults(fault, hits)
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


async def run_table(backend, agents: Iterable[Any], way: str, begins: int) -> Counter[tuple[Any, ...]]:
    """Every agent with every fault, eight at a time; raises for the first that is not as it must be. Gives how each ended."""
    ends: Counter[tuple[Any, ...]] = Counter()
    places = asyncio.Semaphore(8)

    async def one(agent: Any, fault: str) -> None:
        async with places, serve(fault, range(begins, 1000)) as server:
            done = await attempt(backend, server, agent, way, limit_s=10 if fault == "hang" else 120)
        where = (way, done.agent, fault, begins)
        assert done.failure is not None, (where, done.status, done.reward, done.log_tail, done.gate_log_tail)
        end = (done.reward, done.failure.boundary, done.failure.retry, done.failure.trainable, done.status)
        assert end == (None, "policy", True, False, "infra_error"), (where, end, done.failure, done.gate_log_tail)
        assert done.failure.status == STATUS.get(fault, done.failure.status), (where, done.failure)
        assert WORDS.get(fault, "") in done.failure.message, (where, done.failure)
        assert KEY not in str(done.failure) and KEY not in done.log_tail, where
        ends[end] += 1

    async with asyncio.TaskGroup() as group:
        for agent in agents:
            for fault in FAULTS:
                group.create_task(one(agent, fault))
    return ends


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("begins", [1, 2])
async def test_an_outage_has_no_reward_and_is_run_again(backend, way, begins):
    ends = await run_table(backend, ("shell-agent", QUIET), way, begins)
    assert sum(ends.values()) == 2 * len(FAULTS)


@pytest.mark.slow
@pytest.mark.agent
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("begins", [1, 2])
async def test_an_outage_under_a_real_agent_has_no_reward_and_is_run_again(backend, way, begins):
    ends = await run_table(backend, ("pi", "codex"), way, begins)
    assert sum(ends.values()) == 2 * len(FAULTS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agent", ["shell-agent", QUIET], ids=["shell-agent", "quiet"])
async def test_an_outage_that_heals_is_graded(backend, agent, way):
    async with serve("broken", range(2, 4)) as server:
        done = await attempt(backend, server, agent, way)
    assert (done.reward, done.failure, done.status) == (1.0, None, "completed"), (done.failure, done.log_tail)
    assert server.calls == 4


@pytest.mark.slow
@pytest.mark.agent
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agent", ["pi", "codex"])
async def test_an_outage_that_heals_under_a_real_agent_is_graded(backend, agent, way):
    async with serve("broken", range(2, 3)) as server:
        done = await attempt(backend, server, agent, way)
    assert (done.reward, done.failure) == (1.0, None), (done.failure, done.log_tail)
