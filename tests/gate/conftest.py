"""Policies that answer at once, a log in memory, and a gate on loopback for the tests of this folder."""

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

    async def load_blob(self, digest, rollout_id):
        blob = self.blobs[digest]
        if isinstance(blob, bytes):
            return blob
        from rollyard.core.delta import apply

        return apply(blob, await self.load_blob(blob.base, rollout_id))


@asynccontextmanager
async def open_gate(policy=None, **options):
    options.setdefault("host", "127.0.0.1")
    options.setdefault("limits", GateLimits(tick_s=0.02))
    async with Gate(policy or Answers(), **options) as gate:
        yield gate


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


class Answer:
    """A response as bytes arrived."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1]) if head else 0
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        if self.headers.get("transfer-encoding") == "chunked":
            self.body = _unchunked(self.body)

    @property
    def json(self):
        import json

        return json.loads(self.body)


def _unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        out, data = out + data[:length], data[length + 2 :]
        if not length:
            break
    return out


def request(method: str, path: str, *, key: str | None = None, body: bytes | dict = b"", headers: dict | None = None):
    import json

    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "127.0.0.1", "connection": "close", "content-length": str(len(data))}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    lines.update(headers or {})
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items() if v is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def port_of(gate) -> int:
    return int(gate.url.rpartition(":")[2])


async def send(gate, data: bytes) -> Answer:
    """Bytes to the gate on a connection of their own, and what came back until it was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gate))
    try:
        writer.write(data)
        return Answer(await asyncio.wait_for(reader.read(), 20))
    finally:
        writer.close()


async def ask(gate, method: str, path: str, **options) -> Answer:
    return await send(gate, request(method, path, **options))


def chat(text: str = "hi", **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
