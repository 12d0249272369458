"""A model server that refuses: told before a run, stopped during one, and its own words kept for the operator alone."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import UpstreamError
from rollyard.core.failure_groups import FailureGroup, alike, group_failures
from rollyard.core.rollout import Failure, Rollout
from rollyard.core.task import Task, VerifierSpec
from rollyard.policy.renderers.bytelevel import END
from rollyard.runs.run.policy_health import AWAY_S, PolicyHealth
from rollyard.store.listing import show
from tests.runs.conftest import CHECK

pytestmark = pytest.mark.anyio

KEY = "sk-operator-secret-0123456789abcdef"
NO_MODEL = "The model `typo` does not exist at gpu-node-17."


class ModelServer:
    """As vLLM 0.32 answers: `/v1/models` lists one model, another name is 404 with a message that names it."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Any] = []  # what each call of the agents is answered with; the last one for ever
        self.calls: list[dict[str, Any]] = []
        self.lists = True
        self.context = 8192

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            row = {"id": "smol", "owned_by": "vllm", "max_model_len": self.context}
            return web.json_response({"data": [row]}) if self.lists else web.json_response({}, status=404)
        if request.path == "/inference/v1/generate":
            return web.json_response({"error": "Forbidden"}, status=403)
        body = json.loads(await request.read())
        if body["model"] != "smol":
            return web.json_response({"error": {"message": NO_MODEL, "code": 404}}, status=404)
        self.calls.append(body)
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(answer, status=status)


def says(text: str | None = None, shell: str | None = None) -> tuple[int, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if shell is not None:
        call = {"name": "shell", "arguments": json.dumps({"command": shell})}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
    choice = {"index": 0, "message": message, "finish_reason": "stop" if shell is None else "tool_calls"}
    return 200, {"id": "r", "model": "smol", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


WORK = says(shell="echo hello > out.txt")
BAD_KEY = (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    made = ModelServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


def tasks(count: int = 1) -> list[Task]:
    judge = VerifierSpec(kind="commands", options={"commands": [CHECK]})
    return [Task(id=f"t{number}", instruction="x", verifier=judge) for number in range(count)]


async def finish(store, backend, policy, *, count=1, **options):
    async with (
        ry.Gate(policy, log=store) as gate,
        ry.Run(tasks(count), agent="shell-agent", sandbox=backend, gate=gate, store=store, **options) as run,
    ):
        return run.id, [rollout async for rollout in run]


async def test_a_model_that_the_server_does_not_know_ends_a_run_before_it_is_kept(tmp_path, backend, server):
    async with ry.Store.open(tmp_path / "runs.db") as store:
        with pytest.raises(UpstreamError) as refused:
            await finish(store, backend, ry.policy.upstream(server.url, model="typo", key=KEY))
        assert await store.list_runs() == []
    said = str(refused.value)
    assert server.url in said and "'typo'" in said and NO_MODEL in said and "it serves: smol" in said
    assert not server.calls


async def test_a_refused_key_and_a_silent_address_end_a_run_before_it_is_kept(tmp_path, backend, server):
    server.lists, server.answers = False, [BAD_KEY]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        async with ry.Store.open(tmp_path / "runs.db") as store:
            for url, words in ((server.url, "Incorrect API key provided: [key]"), (nobody, "Connection refused")):
                for policy in (
                    ry.policy.upstream(url, model="smol", key=KEY),
                    ry.policy.tokens(url, "smol", kind="completions", renderer="bytes", key=KEY),
                ):
                    with pytest.raises(UpstreamError) as refused:
                        await finish(store, backend, policy)
                    assert url.removesuffix("/v1") in str(refused.value) and words in str(refused.value)
                    assert KEY not in str(refused.value)
            assert await store.list_runs() == []


async def test_an_agent_that_calls_nobody_needs_no_server(tmp_path, backend, server):
    async with (
        ry.Store.open(tmp_path / "runs.db") as store,
        ry.Gate(ry.policy.upstream("http://127.0.0.1:9/v1")) as gate,
    ):
        async with ry.Run(tasks(), agent="nop", sandbox=backend, gate=gate, store=store) as run:
            assert [rollout.status async for rollout in run] == ["completed"]


@pytest.mark.slow
async def test_a_policy_that_fails_alike_is_stopped_and_what_is_left_is_owed(tmp_path, backend, server):
    db = tmp_path / "runs.db"
    server.answers = [BAD_KEY]
    async with ry.Store.open(db) as store:
        policy = ry.policy.upstream(server.url, model="smol", key=KEY)
        run_id, done = await finish(store, backend, policy, count=20, parallel=2, retries=0, policy_failures=3)
        report = await ry.report(store, run_id)
        assert len(done) < 5 and report.owed == 20 - len(done)
        (group,) = report.failure_groups
        assert group.boundary == "policy" and group.count == len(done)
        for words in (group.message, report.stopped[""], str(report), done[0].error):
            assert f"{server.url}/chat/completions answered 401: Incorrect API key provided: [key]" in words
            assert KEY not in words
        assert done[0].failure.status == 401
        assert all(server.url not in rollout.log_tail and "Incorrect" not in rollout.log_tail for rollout in done)
        server.answers = [WORK, says("done")] * 19 + [WORK, says("done")]
        async with ry.Gate(ry.policy.upstream(server.url, model="smol"), log=store) as gate:
            again = ry.Run(
                tasks(20), agent="shell-agent", sandbox=backend, gate=gate, store=store, resume=run_id, parallel=1
            )
            async with again as run:
                assert len([rollout async for rollout in run]) == 20 - len(done)
        assert not (await ry.report(store, run_id)).stopped
    text, kept = (await show(str(db), run_id)).text("all"), (await show(str(db), run_id)).document("all")
    assert re.search(rf"^failed +{len(done)} at policy", text, re.MULTILINE) and "Incorrect API key provided" in text
    assert kept["failures"] == (group,)


async def test_a_full_context_after_work_is_the_agents_ending(tmp_path, backend, server):
    words = "This model's maximum context length is 8192 tokens. However, your request has 9000 input tokens."
    server.answers = [WORK, (400, {"error": {"message": words, "type": "BadRequestError", "code": 400}})]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        run_id, (done,) = await finish(store, backend, ry.policy.upstream(server.url, model="smol"), retries=3)
        assert (done.status, done.stop_reason, done.reward, done.failure) == ("budget", "context", 1.0, None)
        assert (await store.progress(run_id)) == {"done": 1}
    assert "8192" not in done.log_tail


async def test_a_context_that_tokens_sees_to_be_full_is_the_agents_ending_too(tmp_path, backend, server):
    call = {"name": "shell", "arguments": {"command": "echo hello > out.txt; seq 100000"}}
    sampled = [*f"<tool_call>{json.dumps(call)}</tool_call>".encode(), END]
    choice = {"token_ids": sampled, "logprobs": {"token_logprobs": [-0.1] * len(sampled)}, "finish_reason": "stop"}
    server.answers, server.context = [(200, {"id": "r", "choices": [choice]})], 3000
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (done,) = await finish(store, backend, ry.policy.tokens(server.url, renderer="bytes"), retries=3)
    assert (done.status, done.stop_reason, done.reward, done.failure) == ("budget", "context", 1.0, None)
    assert done.turns[0].completion_ids == sampled and len(server.calls) == 1


async def test_a_refused_request_of_the_agents_own_is_judged_and_a_prompt_that_never_fitted_is_not(
    tmp_path, backend, server
):
    server.answers = [WORK, (422, {"error": {"message": "tool_choice is nonsense"}})]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        _, (judged,) = await finish(store, backend, ry.policy.upstream(server.url, model="smol"))
        assert (judged.status, judged.reward, judged.failure.boundary) == ("agent_error", 1.0, "agent")
        server.answers = [(400, {"error": {"message": "maximum context length is 10"}})]
        _, (first,) = await finish(store, backend, ry.policy.upstream(server.url, model="smol"), retries=0)
        assert (first.status, first.reward, first.failure.boundary) == ("infra_error", None, "policy")


async def test_a_budget_that_was_spent_on_calls_that_nobody_answered_is_not_judged(tmp_path, backend, server):
    server.answers = [(500, {"error": {"message": "the engine is dead"}})]
    async with ry.Store.open(tmp_path / "runs.db") as store:
        policy = ry.policy.upstream(server.url, model="smol")
        _, (done,) = await finish(store, backend, policy, retries=0, max_calls=2)
    assert (done.status, done.reward, done.failure.boundary) == ("infra_error", None, "policy")
    assert "the engine is dead" in done.failure.message and done.failure.status == 500


async def rollyard(*argv: str) -> tuple[int, str, str]:
    done = await anyio.run_process([sys.executable, "-m", "rollyard", *argv], check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
async def test_the_command_line_ends_with_3_before_anything_opens_and_when_a_policy_was_stopped(tmp_path, server):
    server.answers = [BAD_KEY]
    db = str(tmp_path / "runs.db")
    chosen = ["run", "examples/tasks", "--filter", "bug-fix", "--agent", "shell-agent", "--store", db]
    code, _, said = await rollyard(*chosen, "--base-url", server.url, "--model", "typo")
    assert code == 3 and NO_MODEL in said and server.url in said and "Traceback" not in said
    alone = ["run", "--instruction", "x", "--agent", "shell-agent", "--store", str(tmp_path / "one.db")]
    code, _, said = await rollyard(*alone, "--base-url", server.url, "--model", "typo")
    assert code == 3 and NO_MODEL in said and "Traceback" not in said
    code, out, _ = await rollyard(*chosen, "--base-url", server.url, "--model", "smol", "--attempts", "12", "--json")
    report = json.loads(out)
    assert code == 3 and report["owed"] > 6 and "Incorrect API key provided: [key]" in report["stopped"][""]
    code, out, _ = await rollyard(*chosen, "--base-url", server.url, "--model", "smol", "--attempts", "12")
    assert code == 3 and f"{server.url}/chat/completions answered 401: Incorrect" in out and "--resume run_" in out


def failed(message: str, status: int | None = None) -> Rollout:
    why = Failure(
        boundary="policy", cause="PolicyError", message=message, stage="wait", retry=True, grade=False,
        trainable=False, status=status,
    )  # fmt: skip
    return Rollout(id="r", task=Task(id="t", instruction=""), failure=why)


def test_rollouts_in_flight_when_a_server_goes_away_are_one_failure_of_it():
    health = PolicyHealth(2)
    assert not any(health.note("p", failed("no answer"), began=0.0, now=AWAY_S + 1.0 + n) for n in range(50))
    assert health.note("p", failed("no answer"), began=900.0, now=901.0) and health.stopped == {"p": "no answer"}
    refused = PolicyHealth(2)
    assert not refused.note("p", failed("bad key (request 17)", 401), began=0.0, now=1.0)
    assert refused.note("p", failed("bad key (request 18)", 401), began=0.0, now=2.0)


def test_a_server_that_is_away_is_waited_for_and_asked_more_and_more_rarely():
    health, now, pauses = PolicyHealth(2), 0.0, []
    while not health.note("p", failed("answered 503"), began=now, now=now + 0.5):
        pauses.append(health.pause_s("p"))
        now += pauses[-1] + 1.0
        assert now < 2 * AWAY_S
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and now >= AWAY_S


def test_an_answer_or_another_failure_ends_a_row_and_zero_never_stops():
    health = PolicyHealth(2)
    fine = Rollout(id="r", task=Task(id="t", instruction=""))
    for rollout in (failed("a", 401), fine, failed("a", 401), failed("b", 401)):
        assert not health.note("p", rollout, began=0.0, now=1.0)
    never = PolicyHealth(0)
    assert not any(never.note("p", failed("a", 401), began=0.0, now=1.0) for _ in range(9))


def test_messages_that_differ_in_ids_and_numbers_are_one_group():
    assert alike("request req_011CQa9 took 3.5 s") == alike("request req_77zzPq1 took 12 s")
    assert alike("no such model") != alike("no such key")
    one = [FailureGroup(boundary="policy", cause="E", message=f"busy ({n} s)", count=1) for n in range(5)]
    (group,) = group_failures(one)
    assert (group.message, group.count) == ("busy (0 s)", 5)
