"""`max_waiting`: calls go to a model server as its own queue has room, and a busy one is asked again when it says."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

import rollyard as ry
from rollyard.core.errors import ConfigError, UpstreamError
from rollyard.policy.admission import read_queue

from .conftest import plain_call

pytestmark = pytest.mark.anyio
ANSWER = {
    "choices": [
        {
            "token_ids": [104],
            "logprobs": {"token_logprobs": [-0.5]},
            "message": {"role": "assistant", "content": "h"},
            "finish_reason": "stop",
        }
    ]
}
# as vLLM 0.32 and its engines write it (vllm/v1/metrics/loggers.py)
PAGE = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 99.0
vllm:num_requests_running{{engine="0",model_name="m"}} 5.0
"""


class BusyServer:
    """Says how many requests wait there, and refuses the first calls with the headers it is given."""

    def __init__(self, waiting=0, refusals=()):
        self.waiting, self.refusals = waiting, list(refusals)
        self.readings = self.answered = 0
        self.changed = asyncio.Event()

    async def answer(self, request):
        self.changed.set()
        if request.path == "/metrics":
            self.readings += 1
            page = PAGE.format(waiting=self.waiting) if self.waiting is not None else "up 1\n"
            return web.Response(text=page)
        if request.method == "GET":
            return web.json_response({}, status=404)
        if self.refusals:
            status, headers = self.refusals.pop(0)
            return web.json_response({}, status=status, headers=headers)
        self.answered += 1
        return web.json_response(ANSWER)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def policy_on(kind, url, **options):
    if kind == "upstream":
        return ry.policy.upstream(f"{url}/v1", "m", **options)
    return ry.policy.tokens(url, "m", kind="completions", renderer="bytes", **options)


@pytest.mark.parametrize("kind", ["tokens", "upstream"])
async def test_calls_wait_here_while_too_many_wait_there(serving, kind):
    server = BusyServer(waiting=5)
    policy = policy_on(kind, await serving(server.answer), max_waiting=2)
    call = asyncio.create_task(policy(plain_call()))
    await server.until(lambda: server.readings >= 3)
    assert server.answered == 0 and not call.done()
    server.waiting = 2
    await call
    assert server.answered == 1 and policy.counters()["held_queue"] == 1
    await policy.aclose()


async def test_one_reading_lets_as_many_go_as_the_queue_has_room_for(serving):
    """Ten calls at once, and a queue that stays as full as it was: at most three go for each reading."""
    server = BusyServer(waiting=0)
    policy = policy_on("tokens", await serving(server.answer), max_waiting=2)
    await asyncio.gather(*(policy(plain_call()) for _ in range(10)))
    assert server.answered == 10 and server.readings >= 4
    await policy.aclose()


async def test_a_busy_server_is_asked_again_when_it_says(serving):
    refusals = [(429, {"retry-after": "0"}), (503, {"retry-after": "0.01"})]
    server = BusyServer(refusals=refusals)
    policy = policy_on("tokens", await serving(server.answer), max_waiting=0)
    await policy(plain_call())
    assert policy.counters()["held_retry_after"] == 2
    server.refusals = [(429, {})]
    with pytest.raises(UpstreamError, match="429"):
        await policy(plain_call())
    await policy.aclose()
    server.refusals = refusals[:1]
    plain = policy_on("tokens", await serving(server.answer))
    with pytest.raises(UpstreamError, match="429"):
        await plain(plain_call())
    await plain.aclose()


async def test_a_server_that_does_not_say_is_asked_at_once(serving, caplog):
    server = BusyServer(waiting=None)
    policy = policy_on("tokens", await serving(server.answer), max_waiting=0)
    with caplog.at_level(logging.WARNING, "rollyard.policy"):
        await asyncio.gather(*(policy(plain_call()) for _ in range(5)))
    assert server.answered == 5 and "held_queue" not in policy.counters()
    assert len([line for line in caplog.messages if "does not say how many" in line]) == 1
    await policy.aclose()


def test_the_queue_is_read_as_each_engine_calls_it():
    assert read_queue(PAGE.format(waiting=3)) == 3
    assert read_queue('sglang:num_queue_reqs{a="b"} 2.0\nsglang:num_queue_reqs{a="c"} 1.0\n') == 3
    assert read_queue("llamacpp:requests_deferred 4\n") == 4
    assert read_queue("llamacpp:requests_deferred x\n") is None and read_queue("") is None


def test_a_negative_number_is_refused():
    with pytest.raises(ConfigError, match="max_waiting"):
        ry.policy.tokens("http://127.0.0.1:1", renderer="bytes", max_waiting=-1)
