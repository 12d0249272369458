"""Retries, joins and readers that go away: which request is a new turn, and which gets an answer that exists already."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollyard.core.call import TokenText, floats
from rollyard.gate import GateLimits
from tests.gate.conftest import Answers, ask, chat, open_gate, port_of, request, said
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


class Gated(Answers):
    """Answers only when told to, with a new text each time."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        super().__init__(self._later)

    async def _later(self, call):
        number = len(self.asked)
        await self.go.wait()
        return said(f"answer {number}")


def text_of(answer) -> str:
    return answer.json["choices"][0]["message"]["content"]


async def leave(gate, session, body, path=CHAT, **headers) -> None:
    """Send a request and go away once the policy has it."""
    before = len(gate.policy.asked)
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
    writer.write(request("POST", path, key=session.key, body=body, headers=headers))
    await until(lambda: len(gate.policy.asked) > before)
    writer.close()
    await until(lambda: all(t.abandoned for t in session.turns.live))


async def test_an_identical_body_whose_reader_is_gone_joins_that_turn():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        await leave(gate, session, chat())
        again = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        await until(lambda: gate.counters.joined == 1)
        policy.go.set()
        assert text_of(await again) == "answer 1"
        assert len(policy.asked) == 1
        assert len(session.trajectory.records) == 1


GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def test_a_body_that_names_no_model_joins_a_turn_of_its_own_model_alone():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        await leave(gate, session, GEMINI, "/v1beta/models/large:streamGenerateContent?alt=sse")
        asked = [
            asyncio.ensure_future(
                ask(gate, "POST", f"/v1beta/models/{name}:generateContent", key=session.key, body=GEMINI)
            )
            for name in ("small", "large")
        ]
        await until(lambda: gate.counters.joined == 1 and len(policy.asked) == 2)
        policy.go.set()
        small, large = [(await one).json for one in asked]
        assert (small["modelVersion"], large["modelVersion"]) == ("small", "large")
        words = [one["candidates"][0]["content"]["parts"][0]["text"] for one in (small, large)]
        assert words == ["answer 2", "answer 1"]


async def test_after_a_restart_a_body_that_names_no_model_gets_the_answer_of_its_own_model(log):
    policy = Answers(lambda call: said(f"{call.model} {len(policy.asked)}"))
    answers = []
    for retries in ("0", "1"):
        async with open_gate(policy, log=log) as gate:
            if not log.kept:
                key = (await gate.open_session("r1")).key
            for name in ("large", "small"):
                path, headers = f"/v1beta/models/{name}:generateContent", {"x-stainless-retry-count": retries}
                answer = await ask(gate, "POST", path, key=key, body=GEMINI, headers=headers)
                answers.append(answer.json["candidates"][0]["content"]["parts"][0]["text"])
    assert answers == ["large 1", "small 2"] * 2


async def test_the_tokens_that_an_agent_asked_to_see_are_said_again_after_a_restart(log):
    tokens = (TokenText("he", -0.5), TokenText("llo", -0.25))
    sampled = msgspec.structs.replace(said("hello", sampled=(1, 2)), tokens=tokens, logprobs=floats([-0.5, -0.25]))
    policy = Answers(lambda call: sampled)
    shown = []
    for retries in ("0", "1"):
        async with open_gate(policy, log=log) as gate:
            if not log.kept:
                key = (await gate.open_session("r1")).key
            for options in ({"logprobs": True}, {}):
                headers = {"x-stainless-retry-count": retries}
                answer = await ask(gate, "POST", CHAT, key=key, body=chat(**options), headers=headers)
                shown.append(answer.json["choices"][0]["logprobs"])
    assert [(one["token"], one["logprob"]) for one in shown[0]["content"]] == [("he", -0.5), ("llo", -0.25)]
    assert shown[:2] == shown[2:] and shown[1] is None
    assert len(policy.asked) == 2


async def test_an_answer_that_nobody_got_is_kept_for_the_reader_that_comes_back():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        await leave(gate, session, chat())
        policy.go.set()
        await until(lambda: session.in_flight == 0)
        assert text_of(await ask(gate, "POST", CHAT, key=session.key, body=chat())) == "answer 1"
        assert len(policy.asked) == 1


async def test_two_live_readers_of_one_body_are_two_turns():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        both = [asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat())) for _ in range(2)]
        await until(lambda: len(policy.asked) == 2)
        policy.go.set()
        assert {text_of(await one) for one in both} == {"answer 1", "answer 2"}


async def test_an_unmarked_identical_request_after_a_delivered_answer_is_a_new_turn():
    policy = Gated()
    policy.go.set()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        texts = [text_of(await ask(gate, "POST", CHAT, key=session.key, body=chat())) for _ in range(3)]
        assert texts == ["answer 1", "answer 2", "answer 3"]


@pytest.mark.parametrize("mark", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k1"}])
async def test_a_marked_retry_gets_the_delivered_answer_again(mark):
    policy = Gated()
    policy.go.set()
    first = (
        {"idempotency-key": mark["idempotency-key"]} if "idempotency-key" in mark else {"x-stainless-retry-count": "0"}
    )
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        assert text_of(await ask(gate, "POST", CHAT, key=session.key, body=chat(), headers=first)) == "answer 1"
        assert text_of(await ask(gate, "POST", CHAT, key=session.key, body=chat(), headers=mark)) == "answer 1"
        assert len(policy.asked) == 1


async def test_a_retry_sees_the_logprobs_again_where_it_asked_for_them():
    tokens = (TokenText("he", -0.5), TokenText("llo", -0.25))
    async with open_gate(
        Answers(lambda call: msgspec.structs.replace(said("hello", sampled=(1, 2)), tokens=tokens))
    ) as gate:
        session = await gate.open_session("r1")
        for body in (chat(logprobs=True), chat()):
            first, again = [
                (await ask(gate, "POST", CHAT, key=session.key, body=body, headers={"x-stainless-retry-count": n})).json
                for n in ("0", "1")
            ]
            assert first["choices"] == again["choices"]
            assert bool(first["choices"][0]["logprobs"]) is ("logprobs" in body)
        assert len(gate.policy.asked) == 2


async def test_a_marked_retry_joins_a_turn_that_still_has_its_first_reader():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        first = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        await until(lambda: len(policy.asked) == 1)
        retry = request("POST", CHAT, key=session.key, body=chat(), headers={"x-stainless-retry-count": "2"})
        second = asyncio.ensure_future(_send(gate, retry))
        await until(lambda: gate.counters.joined == 1)
        policy.go.set()
        assert text_of(await first) == text_of(await second) == "answer 1"


async def _send(gate, data):
    from tests.gate.conftest import send

    return await send(gate, data)


async def test_a_key_of_idempotency_used_for_another_body_is_refused():
    policy = Gated()
    policy.go.set()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1")
        mark = {"idempotency-key": "k1"}
        await ask(gate, "POST", CHAT, key=session.key, body=chat("one"), headers=mark)
        answer = await ask(gate, "POST", CHAT, key=session.key, body=chat("two"), headers=mark)
        assert answer.status == 400


async def test_a_failed_turn_is_joined_by_nobody():
    from rollyard.core.errors import UpstreamError

    outcomes = [UpstreamError("no", status=500), said("fine")]

    def answer(call):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async with open_gate(Answers(answer)) as gate:
        session = await gate.open_session("r1")
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat())).status == 500
        retried = await ask(gate, "POST", CHAT, key=session.key, body=chat(), headers={"x-stainless-retry-count": "1"})
        assert text_of(retried) == "fine"
        assert [r.error is None for r in session.trajectory.records] == [False, True]


async def test_a_call_with_no_reader_ends_after_its_time():
    policy = Gated()
    async with open_gate(policy, limits=GateLimits(tick_s=0.02, orphan_s=0.1)) as gate:
        session = await gate.open_session("r1")
        await leave(gate, session, chat())
        await until(lambda: session.in_flight == 0)
        assert policy.cancelled == 1
        assert session.trajectory.records[0].error


async def test_a_held_call_is_taken_back_when_its_reader_leaves():
    policy = Gated()
    async with open_gate(policy) as gate:
        session = await gate.open_session("r1", held=True)
        await leave(gate, session, chat())
        await until(lambda: policy.cancelled == 1)
        assert session.in_flight == 0


async def test_a_turn_past_its_deadline_is_a_timeout_for_its_reader():
    policy = Gated()
    async with open_gate(policy, limits=GateLimits(tick_s=0.02, call_s=0.1)) as gate:
        session = await gate.open_session("r1")
        answer = await ask(gate, "POST", CHAT, key=session.key, body=chat())
        assert answer.status == 504
        assert policy.cancelled == 1


async def test_kept_answers_are_bounded():
    policy = Answers()
    async with open_gate(policy, limits=GateLimits(tick_s=0.02, replays=3)) as gate:
        session = await gate.open_session("r1")
        for number in range(8):
            await ask(gate, "POST", CHAT, key=session.key, body=chat(f"{number}"))
        again = {"x-stainless-retry-count": "1"}
        for number, asked in ((7, 8), (6, 8), (5, 8), (4, 9), (0, 10)):
            await ask(gate, "POST", CHAT, key=session.key, body=chat(f"{number}"), headers=again)
            assert len(policy.asked) == asked, number
