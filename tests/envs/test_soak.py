"""Five hundred sessions at once, for a minute: each answer is its own, and the server's memory stays where it was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rollyard.envs import connect
from tests.envs.test_reattach import program

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SESSIONS = 500
SECONDS = 60.0


def rss_kb(pid):
    [line] = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(line.split()[1])


async def test_five_hundred_sessions_step_for_a_minute_in_flat_memory():
    async with program("--capacity", str(SESSIONS)) as server:
        url = await server.start()
        taken = [0] * SESSIONS
        opened = asyncio.Semaphore(0)
        begin, end = asyncio.Event(), asyncio.Event()

        async def one(number):
            async with connect(url, timeout_s=120.0, connect_s=120.0, ping_s=120.0) as env:
                await env.reset(seed=number)
                opened.release()
                await begin.wait()
                while not end.is_set():
                    taken[number] += 1
                    seen = await env.step({"add": 0})
                    assert seen.observation["total"] == number, "somebody else's answer"

        async with asyncio.TaskGroup() as group:
            for number in range(SESSIONS):
                group.create_task(one(number))
            for _ in range(SESSIONS):
                await opened.acquire()
            began = time.monotonic()
            begin.set()
            await asyncio.sleep(SECONDS / 3)
            settled = rss_kb(server.process.pid)
            await asyncio.sleep(SECONDS * 2 / 3)
            after = rss_kb(server.process.pid)
            end.set()
            took = time.monotonic() - began
        print(f"{sum(taken)} steps in {took:.0f} s by {SESSIONS} sessions, {settled} kB then {after} kB")
        assert min(taken) > 0
        assert after - settled < 4096, f"{settled} kB grew to {after} kB"
