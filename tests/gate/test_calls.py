"""A call: decoded, answered, committed, and only then told."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

from tests.gate.conftest import Answers, open_gate, said

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


async def ask(gate, session, **options):
    async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=session.key, max_retries=0) as client:
        return await client.chat.completions.create(model="m", messages=HI, **options)


async def test_a_call_reaches_the_policy_and_its_answer_comes_back():
    policy = Answers(lambda call: said("four"))
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        reply = await ask(gate, session)
        assert reply.choices[0].message.content == "four"
        assert policy.asked[0].rollout_id == "r1"
        assert policy.asked[0].messages[-1].text == "hi"
        assert session.calls == 1
        assert session.in_flight == 0
        assert session.reached


async def test_an_answer_leaves_only_after_its_commit(log):
    committing, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        committing.set()
        await go.wait()

    log.before_commit = slowly
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, session))
        await committing.wait()
        done, _ = await asyncio.wait([asked], timeout=0.2)
        assert not done
        assert log.records == []
        go.set()
        assert (await asked).choices[0].message.content == "hello"
        assert log.records[0].rollout_id == "r1"


async def test_a_call_that_cannot_be_committed_is_not_answered(log):
    async def full() -> None:
        raise OSError("disk full at /secret/place")

    log.before_commit = full
    async with open_gate(log=log) as gate:
        session = await gate.open_session("r1")
        with pytest.raises(Exception) as caught:
            await ask(gate, session)
        assert caught.value.status_code == 500
        assert "secret" not in str(caught.value.body)
        with pytest.raises(Exception) as caught:
            await ask(gate, session)
        assert caught.value.status_code == 503
        assert session.broken is not None


async def test_a_log_that_never_answers_is_an_error_in_time(log):
    from rollyard.gate import GateLimits

    log.before_commit = asyncio.Event().wait
    async with open_gate(log=log, limits=GateLimits(tick_s=0.02, commit_s=0.1)) as gate:
        session = await gate.open_session("r1")
        with pytest.raises(Exception) as caught:
            await ask(gate, session)
        assert caught.value.status_code == 503
        assert session.broken is not None
        assert session.in_flight == 0
