"""A hundred thousand calls: what was opened is closed, and memory stays where it was."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path

import pytest

from rollyard.gate import Gate, GateLimits
from rollyard.store import Store
from tests.gate.conftest import Answers, port_of, said
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
CALLS, ROLLOUTS, TURNS = 100_000, 20, 50
KINDS = (
    ("/v1/chat/completions", {"model": "m"}),
    ("/v1/chat/completions", {"model": "m", "stream": True}),
    ("/v1/messages", {"model": "m", "max_tokens": 9}),
)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def rollout(gate: Gate, name: str) -> int:
    """One agent: a growing conversation on one connection; every tenth one hangs up in the middle of a call."""
    session = await gate.open_session(name)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
    messages, done = [{"role": "user", "content": f"begin {name}"}], 0
    for turn in range(TURNS):
        path, extra = KINDS[turn % len(KINDS)]
        body = json.dumps({**extra, "messages": messages}).encode()
        head = f"POST {path} HTTP/1.1\r\nauthorization: Bearer {session.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if turn == TURNS - 1 and name.endswith("0"):
            break
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split()[0]))
        messages += [{"role": "assistant", "content": "word"}, {"role": "user", "content": f"go on {turn}"}]
        if len(messages) > 10:
            messages = messages[-1:]
        done += 1
    writer.close()
    await session.close()
    return done


async def test_a_hundred_thousand_calls_leave_nothing_behind(tmp_path):
    """K8"""
    policy = Answers(lambda call: said("word", sampled=(1, 2, 3), prompt=tuple(range(len(call.messages) * 4))))
    policy.asked = _Counter()
    policy.over = _Counter()
    async with Store.open(tmp_path / "calls.db") as store:
        async with Gate(policy, log=store, host="127.0.0.1", limits=GateLimits(closed_keys=500)) as gate:
            done, batch, early = 0, 0, 0.0
            files, tasks = open_files(), len(asyncio.all_tasks())
            while done < CALLS:
                names = [f"b{batch}r{n}" for n in range(ROLLOUTS)]
                done += sum(await asyncio.gather(*(rollout(gate, name) for name in names)))
                batch += 1
                if not early and done > CALLS * 0.3:
                    gc.collect()
                    early = resident_mb()
            await until(lambda: gate.connections == 0)
            gc.collect()
            assert not gate.sessions and gate.in_flight == 0 and gate.waiting == 0
            assert gate.calls.fair_queue.active == 0
            assert len(asyncio.all_tasks()) <= tasks
            assert open_files() <= files + 8  # the store's readers
            assert resident_mb() < early * 1.1 + 5
        assert policy.asked.count >= CALLS


class _Counter:
    """A list that remembers only how long it would be."""

    def __init__(self) -> None:
        self.count = 0

    def append(self, _) -> None:
        self.count += 1
