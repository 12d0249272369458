"""A real vLLM 0.32 with its defaults: what `tokens(url)` and `upstream(url)` do without being told anything about it."""

from __future__ import annotations

import json
import logging
import urllib.request

import pytest

import rollyard as ry
from rollyard.core.call import Sampling, ids
from rollyard.core.errors import UpstreamError
from tests.servers.vllm import MODEL, model_folder, vllm_server

from .conftest import plain_call, user

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def vllm_url():
    with vllm_server("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as url:
        yield url


def tokenize(url: str, text: str) -> list[int]:
    """The engine's own ids."""
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["tokens"]


async def test_tokens_needs_the_address_alone(vllm_url, caplog):
    """Its generate endpoint answers 403, its only model is taken, and its context bounds the answer."""
    policy = ry.policy.tokens(vllm_url)
    with caplog.at_level(logging.WARNING, "rollyard.policy"):
        await policy.check("policy")
        reply = await policy(plain_call(user("Say hello."), sampling=Sampling(max_tokens=12, temperature=0.0)))
        again = await policy(plain_call(user("Say hello."), sampling=Sampling(max_tokens=12, temperature=0.0)))
    assert policy.engine.name == "completions" and reply.model == MODEL and reply.capture == "tokens"
    assert len([line for line in caplog.messages if "answered 403" in line]) == 1
    assert reply.completion_ids == again.completion_ids and 0 < len(reply.completion_ids) <= 12
    assert not reply.flaws and len(reply.logprobs) == len(reply.completion_ids)
    rendered = policy.renderer.decode(reply.prompt_ids)
    assert tokenize(vllm_url, rendered) == reply.prompt_ids.tolist(), "the prompt's ids are the engine's own"
    await policy.aclose()


def renderer():
    """This model's template has no place for tools; agents send some all the same."""
    return ry.policy.renderer(model_folder(), tools="omit")


async def test_an_agent_works_with_tokens_and_the_ids_are_the_engines(vllm_url):
    policy = ry.policy.tokens(vllm_url, renderer=renderer(), sampling={"temperature": 0.0}, max_tokens_cap=24)
    done = await ry.run_rollout("Say hello.", agent="shell-agent", policy=policy)
    assert (done.status, done.failure) == ("completed", None)
    (record,), (branch,) = done.trajectory.records, done.trajectory.branches
    assert record.capture == "tokens" and branch.trained == record.usage.completion_tokens
    sampled = len(done.turns[0].completion_ids)
    prompt = list(branch.ids[:-sampled])
    assert tokenize(vllm_url, policy.renderer.decode(ids(prompt))) == prompt
    assert list(branch.ids[-sampled:]) == done.turns[0].completion_ids
    await policy.aclose()


async def test_an_agent_works_with_upstream_and_the_ids_are_the_engines(vllm_url):
    policy = ry.policy.upstream(f"{vllm_url}/v1", sampling={"temperature": 0.0}, max_tokens_cap=24)
    await policy.check("policy")
    done = await ry.run_rollout("Say hello.", agent="shell-agent", policy=policy)
    assert (done.status, done.failure) == ("completed", None)
    (record,), (branch,) = done.trajectory.records, done.trajectory.branches
    assert record.capture == "tokens" and branch.trained == record.usage.completion_tokens
    prompt = list(branch.ids[: record.usage.prompt_tokens])
    assert tokenize(vllm_url, renderer().decode(ids(prompt))) == prompt
    assert list(branch.ids[len(prompt) :]) == done.turns[0].completion_ids
    await policy.aclose()


async def test_a_wrong_model_is_told_in_the_servers_words(vllm_url):
    policy = ry.policy.upstream(f"{vllm_url}/v1", model="typo")
    with pytest.raises(UpstreamError, match="The model `typo` does not exist") as refused:
        await policy.check("policy")
    assert f"it serves: {MODEL}" in str(refused.value) and vllm_url in str(refused.value)
    await policy.aclose()


@pytest.mark.parametrize("kind", ["tokens", "upstream"])
async def test_a_full_context_is_the_agents_ending(vllm_url, kind):
    """After one turn of work the agent's history no longer fits, and vLLM (or, for `tokens`, its context) says so."""
    model = (
        ry.policy.tokens(vllm_url, renderer=renderer()) if kind == "tokens" else ry.policy.upstream(f"{vllm_url}/v1")
    )
    policy = FirstScripted(model)
    done = await ry.run_rollout("Count.", agent="shell-agent", policy=policy, verify=["test -f counted"])
    assert (done.status, done.stop_reason, done.reward, done.failure) == ("budget", "context", 1.0, None)
    await model.aclose()


class FirstScripted:
    """A script says the first turn, whose output fills the context; the model is asked for the second."""

    def __init__(self, model):
        self._script = ry.policy.scripted({"steps": [{"shell": "touch counted; seq 100000"}, {"text": "done"}]})
        self._model = model

    async def __call__(self, call):
        begun = any(message.role == "assistant" for message in call.messages)
        return await (self._model if begun else self._script)(call)

    async def closed(self, rollout_id):
        await self._model.closed(rollout_id)

    async def aclose(self):
        await self._script.aclose()
