"""Policies that answer at once, a log in memory, and a gate on loopback for the tests of this room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rollyard.core.call import Call, Reply, floats, ids
from rollyard.core.message import Message, Text
from rollyard.gate import Gate, GateLimits


class Answers:
    """A policy made of a function; it counts what it was asked and remembers which rollouts were closed."""

    def __init__(self, answer: Callable[[Call], Reply | Awaitable[Reply]] | None = None) -> None:
        self._answer = answer or (lambda call: said("hello"))
        self.asked: list[Call] = []
        self.over: list[str] = []
        self.cancelled = 0

    async def __call__(self, call: Call) -> Reply:
        self.asked.append(call)
        try:
            answer = self._answer(call)
            return answer if isinstance(answer, Reply) else await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def closed(self, rollout_id: str) -> None:
        self.over.append(rollout_id)

    async def aclose(self) -> None:
        return None


def said(text: str, *, sampled: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> Reply:
    tokens = {"completion_ids": ids(sampled), "prompt_ids": ids(prompt), "logprobs": floats([-0.5] * len(sampled))}
    return Reply(
        message=Message("assistant", (Text(text),)),
        model="served",
        capture="tokens" if sampled else "text",
        **(tokens if sampled else {}),
    )


class MemoryLog:
    """A `CallLog` that keeps everything, in order; `before_commit` lets a test stand in its way."""

    def __init__(self) -> None:
        self.records = []
        self.nodes = {}
        self.blobs = {}
        self.kept = {}
        self.before_commit: Callable[[], Awaitable[None]] | None = None

    async def commit(self, record, nodes, blobs) -> None:
        if self.before_commit is not None:
            await self.before_commit()
        self.records.append(record)
        for node in nodes:
            self.nodes[record.rollout_id, node.id] = node
        self.blobs.update(blobs)

    async def save_session(self, session) -> None:
        self.kept[session.rollout_id] = session

    async def close_session(self, rollout_id, at) -> None:
        import msgspec

        self.kept[rollout_id] = msgspec.structs.replace(self.kept[rollout_id], closed_at=at)

    async def sessions(self):
        return list(self.kept.values())

    async def load_calls(self, rollout_id):
        records = [r for r in self.records if r.rollout_id == rollout_id]
        return records, [n for (owner, _), n in sorted(self.nodes.items()) if owner == rollout_id]

    async def load_blob(self, digest):
        blob = self.blobs[digest]
        if isinstance(blob, bytes):
            return blob
        from rollyard.core.delta import apply

        return apply(blob, await self.load_blob(blob.base))


@asynccontextmanager
async def open_gate(policy=None, **options):
    options.setdefault("host", "127.0.0.1")
    options.setdefault("limits", GateLimits(tick_s=0.02))
    async with Gate(policy or Answers(), **options) as gate:
        yield gate


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()
