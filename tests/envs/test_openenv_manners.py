"""Our client towards OpenEnv's servers, as a server of exactly their strictness sees it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import serve

from rollyard.core.errors import EnvError, EpisodeLost, Unsupported
from rollyard.envs import connect

pytestmark = pytest.mark.anyio
OBSERVED = {"observation": {"message": "here", "metadata": {"n": 1}}, "reward": 1.0, "done": False}


class Strict:
    """Takes `type` and `data` and nothing else, one frame at a time, and now and then says something unasked."""

    def __init__(self):
        self.faults = []
        self.seen = []
        self.sockets = 0
        self.full = 0
        self.drop = False

    async def __call__(self, socket):
        self.sockets += 1
        assert socket.subprotocol is None
        if self.full > 0:
            self.full -= 1
            await socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        await socket.send(json.dumps({"type": "state", "data": {"unasked": True}}))
        async for text in socket:
            frame = json.loads(text)
            self.seen.append(frame)
            if set(frame) - {"type", "data"}:
                self.faults.append(f"extra keys in {frame}")
            if frame["type"] == "close":
                return
            if self.drop:
                self.drop = False
                socket.transport.abort()
                return
            await socket.send(json.dumps({"type": "notice", "data": {"unasked": True}}))
            await asyncio.sleep(0.02)
            try:
                early = await asyncio.wait_for(socket.recv(), 0.02)
                self.faults.append(f"pipelined: {early}")
            except TimeoutError:
                pass
            kind = {"state": "state", "mcp": "mcp"}.get(frame["type"], "observation")
            data = {"state": {"episode_id": "e"}, "mcp": {"result": {"tools": []}}}.get(kind, OBSERVED)
            await socket.send(json.dumps({"type": kind, "data": data}))


@asynccontextmanager
async def strict():
    told = Strict()
    async with serve(told, "127.0.0.1", 0) as server:
        yield told, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert told.faults == []


async def test_no_key_is_added_and_nothing_is_pipelined_or_mistaken():
    async with strict() as (server, url), connect(url) as env:
        first = await env.reset(seed=3, options={"split": "train"})
        assert (first.observation["message"], first.info) == ("here", {"n": 1})
        results = await asyncio.gather(*(env.step({"message": str(n)}) for n in range(4)), env.state(), env.tools())
        assert [r.reward for r in results[:4]] == [1.0] * 4
        assert results[4] == {"episode_id": "e"}
        assert server.seen[0] == {"type": "reset", "data": {"split": "train", "seed": 3}}
        assert server.seen[1] == {"type": "step", "data": {"message": "0"}}
        with pytest.raises(Unsupported):
            await env.cancel()


async def test_a_full_server_is_tried_again_and_a_lost_socket_is_a_lost_episode():
    async with strict() as (server, url):
        server.full = 2
        async with connect(url, queue_s=60.0) as env:
            await env.reset()
            assert server.sockets == 3
            server.drop = True
            with pytest.raises(EpisodeLost):
                await env.step({"message": "x"})
            with pytest.raises(EpisodeLost):
                await env.step({"message": "x"})
            assert server.sockets == 3  # nothing was tried behind the trainer's back
            await env.reset()  # another episode, on another socket
            assert (await env.step({"message": "y"})).reward == 1.0
            assert server.sockets == 4


async def test_an_answer_that_does_not_come_is_a_lost_episode():
    async def silent(socket):
        async for _ in socket:
            pass

    async with serve(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect(url, timeout_s=0.3, queue_s=0.0) as env:
            with pytest.raises(EnvError, match="no answer"):
                await env.reset()
