"""An outage of the model is never a reward: every agent, in every mode, with every fault.

The table is (agent) x (way to the model) x (fault). A model server fails from the first call on, or from the second on, or only
at the second and third. What failed has no reward, is charged to the policy (or to the gate, where `gate_url` leads nowhere) and
may run again; what healed is graded.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

import rollyard as ry
from rollyard.core.call import Reply
from rollyard.core.errors import UpstreamError
from rollyard.core.message import Message, Text
from rollyard.core.task import Step, Task, VerifierSpec
from rollyard.runs.rollout.plan import Hooks
from rollyard.wire import CODECS, route
from rollyard.wire.codec import WireRequest
from tests.runs.conftest import CHECK, HELLO

pytestmark = pytest.mark.anyio

KEY = "sk-operator-secret-0123456789abcdef"
MODEL = "smol"
WORK = "echo hello > out.txt"
QUIET = ry.agents.from_toml(Path(__file__).with_name("quiet.toml"))


class Faults:
    """A model server. `fault` is what it does to the calls that `hits` names by number; the others it answers."""

    refusal: tuple[int, str] = 400, ""  # of the fault `refuses`

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

    async def _refuses(self, request: web.Request) -> web.StreamResponse:
        status, words = self.refusal
        return web.json_response({"error": {"message": words}}, status=status)

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
SHORT = ("transparent_proxy",)  # the whole table takes its time
STATUS = {"unauthorized": 401, "no_model": 404, "busy": 429, "broken": 500, "refused": 502, "cut": 502, "garbage": 502}
WORDS = {
    "unauthorized": "Incorrect API key provided: [key]",
    "no_model": "The model `smol` does not exist.",
    "busy": "slow down",
    "broken": "the engine is dead",
}


def task() -> Task:
    judge = VerifierSpec(kind="commands", options={"commands": [CHECK]})
    return Task(id="t", instruction="go", verifier=judge)


async def attempt(backend, server: Faults, agent: Any, way: str, limit_s: float = 60) -> ry.Rollout:
    limits = ry.Limits(agent=limit_s)
    shared: dict[str, Any] = {"agent": agent, "sandbox": backend, "model": MODEL, "limits": limits}
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
            return await ry.run_rollout(task(), gate=gate, gate_url=gate.url, **shared)
    if way == "direct":
        return await ry.run_rollout(task(), mode="black_box", direct=True, **given, **shared)
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


async def run_table(backend, agents: Iterable[Any], way: str, begins: int, hang_s: float) -> Counter[tuple[Any, ...]]:
    """Every agent with every fault, eight at a time; raises for the first that is not as it must be. Gives how each ended."""
    ends: Counter[tuple[Any, ...]] = Counter()
    places = asyncio.Semaphore(8)

    async def one(agent: Any, fault: str) -> None:
        async with places, serve(fault, range(begins, 1000)) as server:
            done = await attempt(backend, server, agent, way, limit_s=hang_s if fault == "hang" else 300)
        where = (way, done.agent, fault, begins)
        assert done.failure is not None, (where, done.status, done.reward, done.log_tail, done.gate_log_tail)
        end = (done.reward, done.failure.boundary, done.failure.retry, done.failure.trainable, done.status)
        assert end == (None, "policy", True, False, "infra_error"), (where, end, done.failure, done.gate_log_tail)
        assert done.failure.status == STATUS.get(fault, done.failure.status), (where, done.failure)
        assert WORDS.get(fault, "") in done.failure.message, (where, done.failure)
        assert KEY not in str(done.failure), where
        assert way == "direct" or KEY not in done.log_tail, where  # a direct agent has the key
        ends[end] += 1

    async with asyncio.TaskGroup() as group:
        for agent in agents:
            for fault in FAULTS:
                group.create_task(one(agent, fault))
    return ends


@pytest.mark.parametrize("way", [way if way in SHORT else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize("begins", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_an_outage_has_no_reward_and_is_run_again(backend, way, begins):
    ends = await run_table(backend, ("shell-agent", QUIET), way, begins, hang_s=10)
    assert sum(ends.values()) == 2 * len(FAULTS)


@pytest.mark.slow
@pytest.mark.agent
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("begins", [1, 2])
async def test_an_outage_under_a_real_agent_has_no_reward_and_is_run_again(backend, way, begins):
    ends = await run_table(backend, ("pi", "codex"), way, begins, hang_s=60)
    assert sum(ends.values()) == 2 * len(FAULTS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agent", ["shell-agent", QUIET], ids=["shell-agent", "quiet"])
@pytest.mark.ordinary("shell-agent-black_box", "quiet-transparent_proxy", "quiet-direct")
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


OF_THE_AGENT = {
    "bad request": (400, "tool_choice is nonsense", None),
    "too large": (413, "the body is too large", None),
    "unprocessable": (422, "messages must alternate", None),
    "context": (400, "This model's maximum context length is 8192 tokens.", "context"),
    "filter": (400, "The response was filtered due to Azure OpenAI's content management policy.", "content_filter"),
}


@pytest.mark.parametrize("way", ["black_box", "transparent_proxy", "interception_gate"])
@pytest.mark.parametrize("kind", OF_THE_AGENT)
@pytest.mark.ordinary(
    "bad request-black_box",
    "too large-transparent_proxy",
    "unprocessable-interception_gate",
    "context-transparent_proxy",
    "filter-black_box",
)
async def test_a_refused_request_of_the_agents_own_is_judged_and_not_run_again(backend, way, kind):
    status, words, reason = OF_THE_AGENT[kind]
    for agent in ("shell-agent", QUIET):
        async with serve("refuses", range(2, 1000)) as server:
            server.refusal = status, words
            done = await attempt(backend, server, agent, way)
        assert done.reward == 1.0 and not (done.failure and done.failure.retry), done.failure
        if reason is not None:
            assert (done.status, done.stop_reason, done.failure) == ("budget", reason, None)
        elif agent is QUIET:
            assert (done.status, done.failure) == ("completed", None)
        else:
            assert (done.status, done.failure.boundary) == ("agent_error", "agent")
            assert "of its own" in done.failure.message


@pytest.mark.parametrize("way", ["black_box", "transparent_proxy"])
async def test_a_model_that_the_agent_was_not_given_is_its_own_request(backend, way):
    """Otherwise it could void its attempt by asking for a model that is not there."""
    other = replace(QUIET, env={**QUIET.env, "MODEL": "mine"})
    async with serve("no_model", range(2, 1000)) as server:
        done = await attempt(backend, server, other, way)
    assert (done.reward, done.failure) == (1.0, None)


@pytest.mark.parametrize("way", ["black_box", "interception_gate"])
@pytest.mark.ordinary("interception_gate")
async def test_an_agent_that_leaves_its_own_call_is_judged(backend, way):
    *python, asks = QUIET.argv
    assert asks.count("timeout=900") == 1
    leaves = replace(QUIET, argv=(*python, asks.replace("timeout=900", "timeout=900 if len(asked) < 2 else 1")))
    async with serve("hang", range(2, 1000)) as server:
        done = await attempt(backend, server, leaves, way)
    assert (done.reward, done.failure) == (1.0, None)


async def test_a_route_that_leads_nowhere_is_told_before_the_agent_starts(backend):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        shared = {"agent": QUIET, "sandbox": backend}
        policy = ry.policy.scripted(HELLO)
        lost = await ry.run_rollout(task(), policy=policy, gate_url=url, **shared)
        direct = await ry.run_rollout(task(), mode="black_box", base_url=f"{url}/v1", key=KEY, direct=True, **shared)
    assert (lost.reward, lost.failure.boundary, lost.failure.retry) == (None, "gate", True)
    assert (direct.reward, direct.failure.boundary, direct.failure.retry) == (None, "policy", True)
    for done in (lost, direct):
        assert url in done.failure.message and "refused" in done.failure.message
        assert done.failure.stage == "launch" and not done.log_tail


async def test_another_gate_is_not_this_rollouts_gate(backend):
    async with ry.Gate(ry.policy.scripted(HELLO), host="127.0.0.1") as other:
        done = await ry.run_rollout(
            task(), policy=ry.policy.scripted(HELLO), gate_url=other.url, agent=QUIET, sandbox=backend
        )
    assert (done.reward, done.failure.boundary, done.failure.retry) == (None, "gate", True)
    assert "answered 401" in done.failure.message


async def test_a_parked_agent_is_graded_and_not_run_again(backend):
    parked = replace(QUIET, argv=("sh", "-c", f"{WORK}; sleep 600"))
    limits = ry.Limits(idle=2, agent=60)
    async with serve("hang", range(0)) as server:
        done = await ry.run_rollout(
            task(), agent=parked, sandbox=backend, base_url=server.url, model=MODEL, limits=limits
        )
    assert (done.failure.cause, done.reward, done.failure.retry) == ("AgentParked", 1.0, False)


async def test_a_teardown_hook_that_fails_after_the_verdict_runs_nothing_again(backend):
    async def breaks(sandbox, rollout):
        raise ValueError("boom")

    async with serve("hang", range(0)) as server:
        done = await ry.run_rollout(
            task(), agent=QUIET, sandbox=backend, base_url=server.url, model=MODEL, hooks=Hooks(teardown=(breaks,))
        )
    assert (done.reward, done.failure.retry) == (1.0, False) and "boom" in done.failure.message


async def test_the_verdict_of_a_step_is_no_reward_of_an_attempt_that_met_an_outage_later(backend):
    judge = VerifierSpec(kind="commands", grade="shared", options={"commands": ["true"]})
    steps = tuple(Step(name=name, instruction=name, verifier=judge) for name in ("one", "two"))
    async with serve("broken", range(3, 1000)) as server:
        done = await ry.run_rollout(
            Task(id="t", instruction="", steps=steps), agent=QUIET, sandbox=backend, base_url=server.url, model=MODEL
        )
    assert server.calls > 2
    assert (done.reward, done.failure.boundary, done.failure.retry) == (None, "policy", True)
