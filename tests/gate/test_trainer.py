"""The trainer's API: held calls taken and answered from another process, versions, pause and resume."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.policy import Queue
from tests.gate.conftest import Answers, ask, chat, open_gate, port_of, request, said
from tests.waiting import until

pytestmark = pytest.mark.anyio
KEY = "trainer-" + "t" * 20
CHAT = "/v1/chat/completions"


async def trainer(gate, method, path, body=b""):
    return await ask(gate, method, path, key=KEY, body=body)


async def take(gate, **flags):
    query = "&".join(f"{k}={v}" for k, v in {"wait": 5, **flags}.items())
    return (await trainer(gate, "GET", f"/calls?{query}")).json["calls"]


async def test_a_call_waits_for_the_trainer_and_gets_its_words():
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat("what?")))
        (held,) = await take(gate)
        assert held["session_id"] == "r1"
        assert held["messages"] == [{"role": "user", "content": "what?"}]
        assert not asked.done()
        answered = await trainer(gate, "POST", f"/calls/{held['call_id']}/reply", {"text": "that", "version": 7})
        assert answered.status == 200
        assert (await asked).json["choices"][0]["message"]["content"] == "that"
        assert session.trajectory.records[0].version_start == 7


async def test_a_whole_chat_completion_may_be_the_reply():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    whole = {
        "choices": [
            {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
        ]
    }
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        await trainer(gate, "POST", f"/calls/{held['call_id']}/reply", {"response": whole})
        assert (await asked).json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


async def test_a_second_or_late_reply_is_refused_and_changes_nothing():
    """K3"""
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        where = f"/calls/{held['call_id']}/reply"
        assert (await trainer(gate, "POST", where, {"text": "one"})).status == 200
        assert (await trainer(gate, "POST", where, {"text": "two"})).status == 409
        assert (await asked).json["choices"][0]["message"]["content"] == "one"
        assert (await trainer(gate, "POST", "/calls/call_x/reply", {"text": "two"})).status == 409


async def test_a_reply_after_the_reader_left_is_refused():
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
        writer.write(request("POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        writer.close()
        await until(lambda: session.in_flight == 0)
        assert (await trainer(gate, "POST", f"/calls/{held['call_id']}/reply", {"text": "late"})).status == 409
        assert session.trajectory.records[0].leaf is None
        assert gate.policy.held == 0


async def test_a_refusal_is_a_generic_error_for_the_agent():
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        await trainer(
            gate, "POST", f"/calls/{held['call_id']}/fail", {"message": "CUDA out of memory on gpu7", "status": 503}
        )
        answer = await asked
        assert answer.status == 503
        assert b"CUDA" not in answer.body


class Watched(Queue):
    taking = 0

    async def take(self, *args, **options):
        self.taking += 1
        try:
            return await super().take(*args, **options)
        finally:
            self.taking -= 1


async def test_calls_of_a_trainer_that_vanished_are_handed_out_again():
    queue = Watched()
    async with open_gate(queue, trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        _, gone = await asyncio.open_connection("127.0.0.1", port_of(gate))
        gone.write(request("GET", "/calls?wait=30", key=KEY))
        await until(lambda: queue.taking == 1)
        gone.close()
        await until(lambda: queue.taking == 0)
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        assert await take(gate, wait=0) == []
        (listed,) = (await trainer(gate, "GET", "/calls?taken=true")).json["calls"]
        assert listed["call_id"] == held["call_id"]
        await trainer(gate, "POST", f"/calls/{held['call_id']}/reply", {"text": "ok"})
        assert (await asked).status == 200
        assert (await trainer(gate, "GET", "/calls?taken=true")).json["calls"] == []


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "ids": [1]}, {"nonsense": 1}, b"{", {"ids": [1], "logprobs": [0.1]}]
)
async def test_a_reply_that_makes_no_sense_leaves_the_call_waiting(body):
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        asked = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat()))
        (held,) = await take(gate)
        where = f"/calls/{held['call_id']}/reply"
        assert (await trainer(gate, "POST", where, body)).status in (400, 409)
        assert (await trainer(gate, "POST", where, {"text": "fine"})).status == 200
        assert (await asked).status == 200


async def test_an_empty_poll_returns_after_its_wait():
    async with open_gate(Queue(), trainer_key=KEY) as gate:
        assert await take(gate, wait=0.05) == []
    async with open_gate(Answers(), trainer_key=KEY) as gate:
        assert (await trainer(gate, "GET", "/calls")).status == 409


async def test_the_policy_version_is_stamped_on_what_comes_without_one():
    async with open_gate(trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        await ask(gate, "POST", CHAT, key=session.key, body=chat("a"))
        assert (await trainer(gate, "POST", "/policy_version", {"version": 12})).json == {"policy_version": 12}
        await ask(gate, "POST", CHAT, key=session.key, body=chat("b"))
        assert [r.version_start for r in session.trajectory.records] == [None, 12]
        assert (await trainer(gate, "POST", "/policy_version", {"version": "x"})).status == 400


async def test_while_paused_new_calls_wait_and_none_is_refused():
    go = asyncio.Event()

    async def answer(call):
        await go.wait()
        return said("ok")

    policy = Answers(answer)
    async with open_gate(policy, trainer_key=KEY) as gate:
        session = await gate.open_session("r1")
        before = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat("before")))
        await until(lambda: len(policy.asked) == 1)
        assert (await trainer(gate, "POST", "/pause")).json == {"paused": True, "in_flight": 1}
        after = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat("after")))
        await until(lambda: gate.waiting == 1)
        go.set()
        assert (await before).status == 200
        assert (await trainer(gate, "POST", "/pause?wait=5")).json == {"paused": True, "in_flight": 0}
        await trainer(gate, "POST", "/policy_version", {"version": 2})
        assert len(policy.asked) == 1
        assert (await trainer(gate, "POST", "/resume")).json == {"paused": False}
        assert (await after).status == 200
        assert [r.version_start for r in session.trajectory.records] == [None, 2]
