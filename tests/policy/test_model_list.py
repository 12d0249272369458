"""A server whose list of models does not come for a while: calls go on, and what the list says counts once it comes."""

import asyncio
import json

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import UpstreamError
from rollyard.policy.model_list import ModelList
from rollyard.policy.renderers.bytelevel import END
from rollyard.policy.upstream_policy import upstream

from .conftest import plain_call

pytestmark = pytest.mark.anyio
LIST = {"data": [{"id": "smol", "owned_by": "vllm", "max_model_len": 8192}]}


def refuse(url, status, body):
    return UpstreamError(f"{url} answered {status}", status=status, body=body)


def answering(*statuses):
    """Each question gets the next of them, the last one stays; 200 comes with the list."""
    left, asked = list(statuses), []

    async def ask():
        status = left.pop(0) if len(left) > 1 else left[0]
        asked.append(status)
        return "http://server", (status, json.dumps(LIST).encode(), None)

    return ask, asked


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_list_that_cannot_come_now_is_asked_for_again(status):
    ask, asked = answering(status, 200)
    found = ModelList(ask, refuse, 10.0, again_s=0.0)
    await found.learn_for_call()
    assert not found.known and not found.models and found.trouble.status == status
    await found.learn_for_call()
    assert [model.id for model in found.models] == ["smol"] and found.trouble is None
    await found.learn_for_call()
    assert asked == [status, 200]


@pytest.mark.parametrize("status", [400, 403, 404, 405])
async def test_a_server_without_a_list_is_asked_once(status):
    ask, asked = answering(status)
    found = ModelList(ask, refuse, 10.0, again_s=0.0)
    await found.learn()
    await found.learn()
    assert found.known and not found.models and asked == [status]


async def test_a_refused_key_raises_for_a_check_and_not_for_a_call():
    ask, _ = answering(401)
    found = ModelList(ask, refuse, 10.0)
    await found.learn_for_call()
    with pytest.raises(UpstreamError):
        await found.learn()
    assert not found.known


async def test_after_a_failure_calls_go_on_for_a_while_without_asking():
    ask, asked = answering(503)
    found = ModelList(ask, refuse, 10.0, again_s=3600.0)
    await asyncio.gather(*(found.learn_for_call() for _ in range(20)))
    await found.learn_for_call()
    assert asked == [503]


async def test_one_call_waits_for_a_list_that_hangs_and_the_others_go_on():
    first, held = asyncio.Event(), asyncio.Event()
    asked = 0

    async def ask():
        nonlocal asked
        asked += 1
        if asked == 1:
            return "http://server", (503, b"", None)
        first.set()
        await held.wait()
        return "http://server", (200, json.dumps(LIST).encode(), None)

    found = ModelList(ask, refuse, 3600.0, again_s=0.0)
    await found.learn_for_call()
    waiting = asyncio.create_task(found.learn_for_call())
    await first.wait()
    for _ in range(20):
        await found.learn_for_call()  # none of these may wait for the one above
    assert asked == 2 and not waiting.done()
    held.set()
    await waiting
    assert found.known


async def test_a_list_that_never_comes_is_given_up():
    found = ModelList(asyncio.Event().wait, refuse, 0.01)
    await found.learn()
    assert not found.known and found.trouble.status == 504


def starting(tokens):
    """A server that starts: its list is a 503 once, then names its model; it knows no other."""
    seen = []

    async def handler(request):
        if request.method == "GET":
            seen.append("list")
            return web.json_response(LIST if len(seen) > 1 else {}, status=200 if len(seen) > 1 else 503)
        body = json.loads(await request.read())
        if body.get("model") != "smol":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        message = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return web.json_response({"id": "c", "model": "smol", "choices": [tokens or message]})

    return handler


SAMPLED = {
    "token_ids": [*b"h", END],
    "logprobs": {"content": [{"token": "x", "logprob": -0.5}] * 2},
    "finish_reason": "stop",
}


@pytest.mark.parametrize("kind", ["upstream", "tokens", "tokens, engine not named"])
async def test_a_server_that_was_starting_is_asked_for_its_own_model_once_it_lists_it(serving, kind):
    if kind == "upstream":
        policy = upstream(await serving(starting(None)) + "/v1")
    else:
        engine = "auto" if "not named" in kind else "vllm"
        policy = ry.policy.tokens(await serving(starting(SAMPLED)), kind=engine, renderer="bytes")
    with pytest.raises(UpstreamError):
        await policy(plain_call())
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await policy(plain_call())).message.text in ("hi", "h")
                break
            except UpstreamError:
                await asyncio.sleep(0.05)
    await policy.aclose()
