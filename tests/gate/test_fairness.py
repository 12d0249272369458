"""Places at the policies: bounded, shared out in turn, refused aloud."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.gate import Budget, GateLimits
from rollyard.gate.fairness import Busy, FairQueue, Lane
from tests.gate.conftest import Answers, ask, chat, open_gate, said
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


async def test_a_noisy_rollout_delays_another_by_one_place_not_by_its_queue():
    order = []

    async def answer(call):
        order.append(call.rollout_id)
        await asyncio.sleep(0.005)
        return said("ok")

    async with open_gate(Answers(answer), limits=GateLimits(tick_s=0.02, concurrent=1)) as gate:
        noisy, quiet = await gate.open_session("noisy"), await gate.open_session("quiet")
        flood = [asyncio.ensure_future(ask(gate, "POST", CHAT, key=noisy.key, body=chat(f"{n}"))) for n in range(50)]
        await until(lambda: gate.waiting > 40)
        begun = len(order)
        assert (await ask(gate, "POST", CHAT, key=quiet.key, body=chat())).status == 200
        assert order.index("quiet") - begun <= 2
        assert {(await one).status for one in flood} == {200}


async def test_a_rollout_has_at_most_its_own_share_at_the_policy():
    most = 0

    async def answer(call):
        nonlocal most
        most = max(most, session.lane.active)
        await asyncio.sleep(0.01)
        return said("ok")

    async with open_gate(Answers(answer)) as gate:
        session = await gate.open_session("r1", budget=Budget(concurrent=3))
        answers = await asyncio.gather(
            *(ask(gate, "POST", CHAT, key=session.key, body=chat(f"{n}")) for n in range(12))
        )
        assert {a.status for a in answers} == {200}
        assert most == 3


async def test_waiting_too_long_is_503_with_a_time_to_come_back():
    async def never(call):
        await asyncio.Event().wait()

    async with open_gate(Answers(never), limits=GateLimits(tick_s=0.02, concurrent=1, queue_s=0.1)) as gate:
        session = await gate.open_session("r1")
        first = asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat("1")))
        await until(lambda: gate.in_flight == 1)
        second = await ask(gate, "POST", CHAT, key=session.key, body=chat("2"))
        assert second.status == 503
        assert int(second.headers["retry-after"]) >= 1
        first.cancel()


async def test_a_full_queue_is_an_answer_and_not_a_drop():
    """K5"""

    async def never(call):
        await asyncio.Event().wait()

    async with open_gate(Answers(never), limits=GateLimits(tick_s=0.02, concurrent=1, queue=2)) as gate:
        session = await gate.open_session("r1")
        held = [asyncio.ensure_future(ask(gate, "POST", CHAT, key=session.key, body=chat(f"{n}"))) for n in range(3)]
        await until(lambda: gate.waiting == 2)
        assert (await ask(gate, "POST", CHAT, key=session.key, body=chat("over"))).status == 503
        await session.close()
        assert {(await one).status for one in held} == {409}
        assert gate.waiting == 0
        assert gate.calls.fair_queue.active == 0


async def test_places_come_back_whatever_ends_the_wait():
    fair_queue = FairQueue(1, queue=10, wait_s=0.05)
    lane, other = Lane(5), Lane(5)
    await fair_queue.enter(lane)
    waiting = asyncio.ensure_future(fair_queue.enter(other))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(Busy):
        await fair_queue.enter(other)
    assert fair_queue.waiting == 0
    granted = asyncio.ensure_future(fair_queue.enter(other))
    await asyncio.sleep(0)
    fair_queue.leave(lane)
    granted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await granted
    assert (fair_queue.free, lane.active, other.active) == (1, 0, 0)
