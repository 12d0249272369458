"""Deadlines of moves, at the server's session and at the client's wire: each move has its own, however many came before it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollyard.core.errors import EnvError, EnvUnavailable, EpisodeLost
from rollyard.envs import Env, StepResult
from rollyard.envs.client import Options, OwnWire
from rollyard.envs.metrics import EnvCounters
from rollyard.envs.session import EnvSession, SessionObserver, SessionTerms
from rollyard.envs.telemetry import Telemetry
from tests.virtual_time import run_in_virtual_time


class Sleeper(Env):
    async def reset(self, *, seed=None, options=None):
        return StepResult(observation="ready")

    async def step(self, action):
        await asyncio.sleep(action["sleep"])
        return StepResult(observation="awake")


class DelayedSocket:
    """A server that answers each request after the seconds its action says."""

    subprotocol = None

    def listen(self, heard, lost):
        self.heard = heard

    def send(self, text):
        asked = msgspec.json.decode(text)
        after = asked["with"].get("action", {}).get("sleep", 0)
        answer = msgspec.json.encode({"id": asked["id"], "ok": asked["id"]})
        asyncio.get_running_loop().call_later(after, self.heard, answer)

    async def recv(self):
        raise NotImplementedError

    def pending(self):
        return None

    async def close(self):
        pass


class SilentSocket(DelayedSocket):
    def send(self, text):
        pass


def test_every_move_of_a_session_has_the_whole_deadline():
    async def main():
        loop = asyncio.get_running_loop()
        watch = SessionObserver(counters=EnvCounters(), telemetry=Telemetry())
        session = EnvSession(Sleeper(), SessionTerms(lease_s=1e6, deadline_s=10), watch)
        await session.do("reset", {})
        for sleep in (7, 9, 0, 9.5, 6):
            assert (await session.do("step", {"action": {"sleep": sleep}}))["observation"] == "awake"
        await asyncio.sleep(100)  # a timer that finds no move ends, and the next move has one again
        for _ in range(2):
            began = loop.time()
            with pytest.raises(EnvError, match="step took longer than 10 s"):
                await session.do("step", {"action": {"sleep": 3600}})
            assert loop.time() - began == pytest.approx(10)
            await session.do("reset", {})
            assert (await session.do("step", {"action": {"sleep": 9}}))["observation"] == "awake"
        await session.aclose()

    run_in_virtual_time(main())


def test_moves_that_wait_for_their_turn_are_timed_from_its_beginning():
    async def main():
        watch = SessionObserver(counters=EnvCounters(), telemetry=Telemetry())
        session = EnvSession(Sleeper(), SessionTerms(lease_s=1e6, deadline_s=10), watch)
        await session.do("reset", {})
        steps = [session.start_move("step", {"action": {"sleep": sleep}}, str(sleep)) for sleep in (9, 8, 7)]
        assert [answer.code for answer in await asyncio.gather(*steps)] == ["OK", "OK", "OK"]
        await session.aclose()

    run_in_virtual_time(main())


def test_every_request_of_a_client_has_its_own_deadline():
    async def main():
        loop = asyncio.get_running_loop()
        wire = OwnWire("ws://127.0.0.1/ws", Options(timeout_s=10, connect_s=2), DelayedSocket())

        async def ask(sleep, move="step"):
            try:
                await wire.ask(move, {"action": {"sleep": sleep}})
                return "answered", loop.time()
            except EnvError as error:
                return type(error), loop.time()

        for sleep in (11, 0, 11.5, 11):
            assert (await ask(sleep))[0] == "answered"
        began = loop.time()
        first = asyncio.create_task(ask(3600))
        await asyncio.sleep(5)
        late, kept, other = asyncio.create_task(ask(3600)), asyncio.create_task(ask(11)), ask(3600, "state")
        assert await first == (EnvError, pytest.approx(began + 12))
        assert await kept == ("answered", pytest.approx(began + 16))
        assert await late == (EnvError, pytest.approx(began + 17))
        assert await other == (EnvUnavailable, pytest.approx(began + 29))

    run_in_virtual_time(main())


def test_closing_waits_for_its_own_deadline_and_ends_a_move_that_has_a_longer_one():
    async def main():
        loop = asyncio.get_running_loop()
        wire = OwnWire("ws://127.0.0.1/ws", Options(timeout_s=1000, connect_s=2), SilentSocket())
        move = asyncio.create_task(wire.ask("step", {"action": {}}))
        await asyncio.sleep(1)
        await wire.aclose()
        assert loop.time() == pytest.approx(3)
        with pytest.raises(EpisodeLost, match="closed"):
            await move
        assert loop.time() == pytest.approx(3)

    run_in_virtual_time(main())
