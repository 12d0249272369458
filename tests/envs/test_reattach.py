"""What a lease promises when the socket, or the whole server, dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from websockets.asyncio.client import connect as websocket

from rollyard.core.errors import EpisodeLost
from rollyard.envs import connect
from tests.envs.conftest import told

pytestmark = pytest.mark.anyio
TARGET = f"{Path(__file__).with_name('conftest.py')}:Counter"


class Program:
    """`rollyard serve env` that can be killed and come back on the same port."""

    def __init__(self, *more: str) -> None:
        self.more = more
        self.port = 0
        self.process = None

    async def start(self) -> str:
        self.process = await asyncio.create_subprocess_exec(
            *(Path(sys.executable).with_name("rollyard"), "serve", "env", TARGET, "--json"),
            *("--port", str(self.port), *self.more),
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        ready = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        self.port = int(ready["url"].rpartition(":")[2])
        return ready["url"]

    async def kill(self, how=signal.SIGKILL) -> None:
        self.process.send_signal(how)
        await self.process.wait()


@asynccontextmanager
async def program(*more):
    running = Program(*more)
    try:
        yield running
    finally:
        if running.process.returncode is None:
            await running.kill()


def own_socket(url, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return websocket(url.replace("http", "ws") + "/ws", subprotocols=["rollyard.v1"], additional_headers=headers)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_a_kept_session_goes_on_after_the_server_was_killed(tmp_path, how):
    async with program("--keep", str(tmp_path)) as server:
        url = await server.start()
        async with connect(url) as env:
            await env.reset(seed=3, episode_id="ep-1")
            assert (await env.step({"add": 4})).observation == {"total": 7}
            await server.kill(how)
            await server.start()
            after = await env.step({"add": 5})
            assert (after.observation, after.info) == ({"total": 12}, {"n": 2})
            state = await env.state()
            assert (state["episode_id"], state["step_count"]) == ("ep-1", 2)
        assert list(tmp_path.iterdir()) == []  # closed: nothing is left of it


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_a_step_that_the_kill_cut_off_has_its_effect_once(tmp_path, how):
    async with program("--keep", str(tmp_path)) as server:
        url = await server.start()
        async with connect(url) as env:
            await env.reset()
            await env.step({"add": 1})
            begun = asyncio.Event()
            step = asyncio.create_task(env.step({"add": 10, "sleep": 1.0}, progress=lambda *_: begun.set()))
            await begun.wait()
            await server.kill(how)
            await server.start()
            assert (await step).observation == {"total": 11}
            assert (await env.step({"add": 100})).observation == {"total": 111}


async def test_an_answer_that_was_made_before_the_kill_is_given_and_not_made_again(tmp_path):
    async with program("--keep", str(tmp_path)) as server:
        url = await server.start()
        step = {"id": "b", "do": "step", "with": {"action": {"add": 1}}}
        async with own_socket(url) as socket:
            session = (await told(socket, {"id": "open", "do": "open", "with": {}}))["ok"]
            await told(socket, {"id": "a", "do": "reset", "with": {}})
            first = await told(socket, step)
            await server.kill()
        await server.start()
        async with own_socket(url) as socket:
            kept = {"session": session["session"], "lease": session["lease"]}
            assert "ok" in await told(socket, {"id": "open", "do": "open", "with": kept})
            assert await told(socket, step) == first  # as if its answer had been on the way
            third = await told(socket, {**step, "id": "c"})
            assert third["ok"]["observation"] == {"total": 2}


async def test_without_a_place_to_keep_it_the_episode_is_lost_and_reset_begins_another():
    async with program() as server:
        url = await server.start()
        async with connect(url) as env:
            await env.reset(seed=3)
            begun = asyncio.Event()
            step = asyncio.create_task(env.step({"add": 1, "sleep": 30}, progress=lambda *_: begun.set()))
            await begun.wait()
            await server.kill()
            await server.start()
            with pytest.raises(EpisodeLost, match="no such session"):
                await step
            with pytest.raises(EpisodeLost):
                await env.step({"add": 1})
            assert (await env.reset(seed=9)).observation == {"total": 9}
            assert (await env.step({"add": 1})).observation == {"total": 10}


async def test_a_server_that_does_not_come_back_is_a_lost_episode_after_the_lease():
    async with program() as server:
        url = await server.start()
        env = await connect(url, lease_s=1.0).__aenter__()
        await env.reset()
        await server.kill()
        with pytest.raises(EpisodeLost, match="lease of 1 s"):
            await env.step({"add": 1})
        await env.close()


@pytest.mark.adversarial
async def test_what_is_kept_holds_no_key(tmp_path):
    key_file = tmp_path / "key"
    async with program("--keep", str(tmp_path / "kept"), "--key-file", str(key_file)) as server:
        url = await server.start()
        async with own_socket(url, key=key_file.read_text().strip()) as socket:
            session = (await told(socket, {"id": "open", "do": "open", "with": {}}))["ok"]
            await told(socket, {"id": "a", "do": "reset", "with": {}})
            [kept] = (tmp_path / "kept").iterdir()
            assert kept.stat().st_mode & 0o077 == 0
            text = kept.read_text()
            assert session["agent_key"] not in text
            assert session["lease"] not in text
