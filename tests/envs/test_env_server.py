"""The Gym API over our own wire and OpenEnv's, on a real server. Rows E1."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from websockets.asyncio.client import connect as websocket

import rollyard as ry
from rollyard.core.errors import ConfigError, EnvError, EnvUnavailable, EpisodeLost
from rollyard.envs import connect
from rollyard.envs.metrics import EnvCounters
from rollyard.envs.session import EnvSession, SessionObserver, SessionTerms
from rollyard.envs.telemetry import Telemetry
from tests.envs.conftest import Counter, served, sockets_kept_in, told
from tests.waiting import Clock, until

pytestmark = pytest.mark.anyio
ECHO = Path(__file__).parents[2] / "examples" / "envs" / "echo.py"


async def shows(http, line):
    """Whether the server's metrics have this line."""
    return line in await (await http.get("/metrics")).text()


def ws(url):
    return url.replace("http", "ws") + "/ws"


async def test_an_episode_over_our_own_wire():
    async with served() as url, connect(url) as env:
        first = await env.reset(seed=7, options={"level": 2})
        assert first.observation == {"total": 7}
        assert first.reward is None
        assert first.info == {"options": {"level": 2}}
        second = await env.step({"add": 3})
        assert (second.observation, second.reward, second.done) == ({"total": 10}, 1.0, False)
        last = await env.step({"add": 90})
        assert (last.terminated, last.truncated) == (False, True)
        state = await env.state()
        assert (state["total"], state["step_count"]) == (100, 2)
        assert [t["name"] for t in await env.tools()] == ["double", "count"]
        assert await env.call("double", {"x": 4}) == 8
        with pytest.raises(EnvError, match="no tool named"):
            await env.call("triple", {})


async def test_a_reward_that_is_no_number_is_refused_and_the_session_goes_on():
    async with served() as url, connect(url) as env:
        await env.reset()
        for reward in ("nan", "inf"):
            with pytest.raises(EnvError, match="not a number that can be a reward"):
                await env.step({"reward": reward})
        assert (await env.step({"add": 1})).observation == {"total": 1}


async def test_an_error_of_the_environment_reaches_the_client_only_as_an_id():
    async with served() as url, connect(url) as env:
        await env.reset()
        with pytest.raises(EnvError) as caught:
            await env.step({"boom": True})
        assert "secret" not in str(caught.value)
        assert "err_" in str(caught.value)


async def test_whoever_comes_at_capacity_waits_for_a_place():
    async with served(capacity=1) as url:
        async with connect(url) as first:
            await first.reset()
            with pytest.raises(EnvUnavailable):
                async with connect(url, queue_s=0.0):
                    pass
            waiting = asyncio.create_task(connect(url, queue_s=30.0).__aenter__())
            async with aiohttp.ClientSession(url) as http:
                await until(lambda: shows(http, "rollyard_env_waiting 1.0"))
            assert not waiting.done()
        second = await waiting
        assert (await second.reset(seed=1)).observation == {"total": 1}
        await second.close()


async def test_a_lost_socket_is_reattached_and_no_step_runs_twice():
    transports = []
    async with served(ws=sockets_kept_in(transports)) as url, connect(url) as env:
        await env.reset()
        begun = asyncio.Event()
        step = asyncio.create_task(env.step({"add": 5, "sleep": 0.5}, progress=lambda *_: begun.set()))
        await begun.wait()
        transports[0].abort()
        assert (await step).info == {"n": 1}
        assert (await env.step({"add": 5})).observation == {"total": 10}


async def test_several_steps_in_flight_when_the_socket_dies_each_run_once():
    transports = []
    async with served(ws=sockets_kept_in(transports)) as url, connect(url) as env:
        await env.reset()
        begun = asyncio.Event()
        steps = [
            asyncio.create_task(env.step({"add": 1, "sleep": 0.2}, progress=lambda *_: begun.set())) for _ in range(3)
        ]
        await begun.wait()
        transports[0].abort()
        await asyncio.gather(*steps)
        assert (await env.step({"add": 1})).observation == {"total": 4}


async def test_another_lease_does_not_open_the_session():
    async with served() as url, connect(url), aiohttp.ClientSession(url) as http:
        [session] = [one["session"] for one in await (await http.get("/sessions")).json()]
        async with websocket(ws(url), subprotocols=["rollyard.v1"]) as other:
            with_ = {"session": session, "lease": "lease-guess"}
            assert (await told(other, {"id": "1", "do": "open", "with": with_}))["error"]["code"] == "SESSION_ERROR"


async def test_a_session_is_reaped_when_nobody_holds_it_and_never_before():
    Counter.closed.clear()
    clock = Clock()
    async with served(lease_s=60, reap_s=0.01, clock=clock) as url:
        async with connect(url) as env, aiohttp.ClientSession(url) as http:
            await env.reset(seed=3)
            left = (await (await http.post("/sessions", json={})).json())["session"]
            await http.post("/sessions", json={"lease_s": 10})
            clock.now += 59
            await until(lambda: Counter.closed == ["closed"])
            assert len(await (await http.get("/sessions")).json()) == 2
            clock.now += 600  # several leases: the held one lives, the abandoned one goes
            await until(lambda: Counter.closed == ["closed"] * 2)
            assert len(await (await http.get("/sessions")).json()) == 1
            gone = await http.post("/step", json={"action": {}}, headers={"x-session-id": left})
            assert gone.status == 404
            assert (await env.step({"add": 1})).observation == {"total": 4}


async def test_a_step_past_its_deadline_is_cut_and_only_reset_goes_on():
    async with served() as url, connect(url, timeout_s=0.3) as env:
        await env.reset()
        with pytest.raises(EnvError, match="longer than"):
            await env.step({"sleep": 60})
        with pytest.raises(EpisodeLost, match="reset"):
            await env.step({"add": 1})
        await env.reset()
        assert (await env.step({"add": 1})).observation == {"total": 1}


async def test_a_running_step_can_be_cancelled():
    async with served() as url, connect(url) as env:
        await env.reset()
        begun = asyncio.Event()
        step = asyncio.create_task(env.step({"sleep": 60}, progress=lambda *_: begun.set()))
        await begun.wait()
        assert await env.cancel()
        with pytest.raises(EnvError, match="cancelled"):
            await step


async def test_a_move_that_is_cancelled_before_it_began_is_answered_too():
    told_of = []
    watch = SessionObserver(counters=EnvCounters(), telemetry=Telemetry())
    session = EnvSession(Counter(), SessionTerms(lease_s=1, deadline_s=60), watch)
    session.start_move("step", {"action": {"sleep": 60}}, "1", told_of.append)
    assert session.cancel()
    with pytest.raises(EnvError, match="cancelled"):
        await session.do("step", {}, request_id="1")
    assert [answer.code for answer in told_of] == ["CANCELLED"]
    assert not session.live
    await session.aclose()


async def test_http_sessions_hold_state_and_plain_requests_are_alone():
    async with served() as url, aiohttp.ClientSession(url) as http:
        opened = await (await http.post("/sessions", json={})).json()
        mine = {"x-session-id": opened["session"]}
        await http.post("/reset", json={"seed": 5, "episode_id": "e1"}, headers=mine)
        stepped = await (await http.post("/step", json={"action": {"add": 2}}, headers=mine)).json()
        assert stepped["observation"]["total"] == 7
        state = await (await http.get("/state", headers=mine)).json()
        assert (state["episode_id"], state["step_count"], state["total"]) == ("e1", 1, 7)
        assert (await (await http.post("/reset", json={})).json())["observation"]["total"] == 0
        assert (await http.post("/step", json={"action": 3})).status == 422
        assert (await http.post("/reset", json={"seed": -1})).status == 422
        assert (await http.post("/reset", data=b"{nan")).status == 400
        health = await (await http.get("/health")).json()
        assert (health["status"], health["sessions"]) == ("healthy", 1)
        assert (await http.delete(f"/sessions/{opened['session']}")).status == 200
        assert (await http.get("/state", headers=mine)).status == 404


async def test_a_step_over_http_is_cancelled_by_another_request():
    async with served() as url, aiohttp.ClientSession(url) as http:
        session = (await (await http.post("/sessions", json={})).json())["session"]
        mine = {"x-session-id": session}
        await http.post("/reset", json={}, headers=mine)
        step = asyncio.create_task(http.post("/step", json={"action": {"sleep": 60}}, headers=mine))
        async with asyncio.timeout(30):
            while not (await (await http.post(f"/sessions/{session}/cancel")).json())["cancelled"]:
                await asyncio.sleep(0.05)
        answer = await step
        assert (answer.status, (await answer.json())["code"]) == (409, "CANCELLED")


async def test_times_are_negotiated_and_the_server_has_the_last_word():
    async with served(max_deadline_s=30.0, max_lease_s=20.0) as url:
        async with websocket(ws(url), subprotocols=["rollyard.v1"]) as socket:
            asked = {"lease_s": 5, "deadline_s": 7}
            small = (await told(socket, {"id": "1", "do": "open", "with": asked}))["ok"]
            assert (small["lease_s"], small["deadline_s"]) == (5, 7)
            again = await told(socket, {"id": "2", "do": "open"})
            assert again["error"]["code"] == "SESSION_ERROR"
        async with websocket(ws(url), subprotocols=["rollyard.v1"]) as socket:
            large = (await told(socket, {"id": "1", "do": "open", "with": {"lease_s": 1e9, "deadline_s": 1e9}}))["ok"]
            assert (large["lease_s"], large["deadline_s"]) == (20, 30)
            wrong = await told(socket, {"id": "2", "do": "open", "with": {"lease_s": -1}})
            assert wrong["error"]["code"] == "VALIDATION_ERROR"


async def test_a_client_in_line_hears_that_the_server_lives():
    async with served(capacity=1, heartbeat_s=0.1) as url, connect(url) as first:
        await first.reset()
        async with websocket(ws(url), subprotocols=["rollyard.v1"]) as second:
            await second.send(json.dumps({"id": "1", "do": "open", "with": {"queue_s": 60}}))
            assert json.loads(await asyncio.wait_for(second.recv(), 10)) == {"event": "heartbeat", "waiting": 1}


async def test_tasks_are_looked_through_and_bad_questions_have_their_status():
    tasks = [{"id": n} for n in range(3)]
    async with served(name="Things", splits={"train": tasks, "odd": tasks[1:2]}) as url:
        async with aiohttp.ClientSession(url) as http:

            async def ask(path, **body):
                answer = await http.post(path, json=body)
                return answer.status, await answer.json()

            splits = await (await http.get("/things/splits")).json()  # names are compared without case, as theirs are
            assert splits == [{"name": "train", "type": "train"}, {"name": "odd", "type": "validation"}]
            assert await ask("/Things/tasks", split="odd") == (200, {"tasks": [{"id": 1}], "env_name": "Things"})
            assert await ask("/Things/num_tasks", split="train") == (200, {"num_tasks": 3})
            assert await ask("/Things/task", split="train", index=2) == (200, {"task": {"id": 2}})
            ranged = await ask("/Things/task_range", split="train", start=1)
            assert ranged == (200, {"tasks": [{"id": 1}, {"id": 2}]})
            for status, path, body in [
                (400, "/Things/task", {"split": "train", "index": 3}),
                (400, "/Things/task", {"split": "train", "index": -1}),
                (400, "/Things/num_tasks", {"split": "none"}),
                (422, "/Things/task", {"split": "train"}),
                (422, "/Things/tasks", {}),
                (422, "/Things/tasks", {"split": "train", "colour": 1}),
                (404, "/Others/tasks", {"split": "train"}),
            ]:
                assert (await ask(path, **body))[0] == status, (path, body)
    async with served(name="Bare") as url, aiohttp.ClientSession(url) as http:
        assert (await http.get("/Bare/splits")).status == 501


async def test_mcp_over_a_socket_has_an_environment_of_its_own():
    Counter.closed.clear()
    async with served() as url, websocket(url.replace("http", "ws") + "/mcp") as socket:
        called = await told(
            socket,
            {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "double", "arguments": {"x": 4}}},
        )
        assert (called["id"], called["result"]["data"]) == (7, 8)
        assert (await told(socket, "{"))["error"]["code"] == -32700
        assert (await told(socket, {"jsonrpc": "2.0", "id": 8, "method": "reset"}))["error"]["code"] == -32601
        await socket.close()
        await until(lambda: Counter.closed == ["closed"])


async def test_openenv_frames_have_exactly_their_shape():
    async with served() as url, websocket(ws(url)) as socket:
        assert await told(socket, {"type": "reset", "data": {"seed": 7, "episode_id": "ep-1", "split": "a"}}) == {
            "type": "observation",
            "data": {
                "observation": {"total": 7, "metadata": {"options": {"split": "a"}}},
                "reward": None,
                "done": False,
                "metadata": {"options": {"split": "a"}},
            },
        }
        stepped = await told(socket, {"type": "step", "data": {"add": 93}})
        assert (stepped["data"]["reward"], stepped["data"]["done"]) == (1.0, True)
        assert await told(socket, {"type": "state"}) == {
            "type": "state",
            "data": {"total": 100, "episode_id": "ep-1", "step_count": 1},
        }


async def test_bad_openenv_frames_are_answered_and_never_end_the_session():
    async with served() as url, websocket(ws(url)) as socket:
        for frame, code in [
            ("{", "INVALID_JSON"),
            ("[1,2]", "VALIDATION_ERROR"),
            ('{"type":"step","data":{},"request_id":"x"}', "VALIDATION_ERROR"),
            ('{"type":"dance"}', "UNKNOWN_TYPE"),
            ('{"type":"reset","data":[]}', "VALIDATION_ERROR"),
            ('{"type":"reset","data":{"seed":"x"}}', "VALIDATION_ERROR"),
            ('{"type":"step","data":{"boom":true}}', "EXECUTION_ERROR"),
        ]:
            answer = await told(socket, frame)
            assert answer["data"].get("code", answer["type"]) == code, frame
        assert (await told(socket, {"type": "reset", "data": {}}))["type"] == "observation"


async def test_an_openenv_client_at_capacity_is_told_and_sent_away():
    async with served(capacity=1) as url, websocket(ws(url)) as first:
        await told(first, {"type": "reset", "data": {}})
        async with websocket(ws(url)) as second:
            frame = json.loads(await second.recv())
            assert frame["data"]["code"] == "CAPACITY_REACHED"
            assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
            await asyncio.wait_for(second.wait_closed(), 10)
            assert second.close_code == 1000


class Own(Counter):
    """Counts for itself, as environments of OpenEnv's do, and is for one session at a time."""

    counts_itself, max_sessions, made = True, 1, []

    async def prepare(self):
        self.made.append("prepared")
        if len(self.made) == 1:
            raise RuntimeError("not yet")

    async def reset(self, *, seed=None, options=None):
        self.steps = 40
        return ry.StepResult(observation={"options": dict(options or {})})

    @property
    def state(self):
        return {"step_count": self.steps}


async def test_an_environment_may_prepare_itself_count_for_itself_and_be_for_one_session():
    Own.made.clear()
    closed = len(Counter.closed)
    async with served(Own, capacity=8) as url:
        with pytest.raises(EnvUnavailable, match="could not be made"):
            async with connect(url, queue_s=0.0):
                pass
        await until(lambda: len(Counter.closed) == closed + 1)  # what was half made is closed, and its place is free
        async with connect(url, queue_s=0.0) as env:
            with pytest.raises(EnvUnavailable, match="all 1 environments"):
                async with connect(url, queue_s=0.0):
                    pass
            first = await env.reset(episode_id="e1", options={"level": 2})
            assert first.observation == {"options": {"level": 2, "episode_id": "e1"}}
            await env.step({"add": 1})
            assert await env.state() == {"episode_id": "e1", "step_count": 41}
    assert Own.made == ["prepared", "prepared"]


async def test_a_tool_cannot_take_a_verb_of_the_environment():
    class Sly(Counter):
        def tools(self):
            @ry.tools.tool(name="reset")
            async def again() -> str:
                return "no"

            return [again]

    with pytest.raises(ConfigError, match="reset"):
        EnvSession(
            Sly(), SessionTerms(lease_s=1, deadline_s=1), SessionObserver(counters=EnvCounters(), telemetry=Telemetry())
        )


def test_the_client_imports_no_server():
    heavy = (
        "starlette",
        "mcp",
        "pydantic",
        "aiohttp",
        "rollyard.tools",
        "rollyard.envs.server",
    )
    code = f"import sys, rollyard.envs.client; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


async def test_the_command_serves_the_example_until_it_is_stopped():
    program = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).parent / "rollyard", "serve", "env", f"{ECHO}:EchoEnv", "--json"),
        stdout=asyncio.subprocess.PIPE,
        cwd="/",
    )
    try:
        ready = json.loads(await asyncio.wait_for(program.stdout.readline(), 60))
        assert ready["name"] == "EchoEnv"
        async with connect(ready["url"]) as env:
            await env.reset()
            assert (await env.step({"message": "hello"})).reward == 5.0
            with pytest.raises(EnvError, match="VALIDATION_ERROR"):
                await env.step({"words": 1})
    finally:
        program.terminate()
        await asyncio.wait_for(program.wait(), 30)
    assert program.returncode in (0, -15)
