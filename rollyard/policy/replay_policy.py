"""`replay`: a recorded rollout answered again, call by call.

A call is found by what it says (the chained digests of its tools and messages); asked again, it gets the next recorded
answer to the same request. An agent whose prompt holds a date, a path or a session id never says quite the same twice: with
`strict=False` a call that is not found takes the recorded call at the same depth, and the difference is kept as a diff in
`mismatches`. With `strict=True` it is an error. The answers carry the recorded ids and logprobs, and are not trainable:
they were sampled then, not now.
"""

from __future__ import annotations

import difflib
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollyard.core.call import REPLAYED, Call, CallRecord, Reply
from rollyard.core.errors import ConfigError, PolicyError
from rollyard.core.message import Message, ToolCall, ToolResult, tools_digest
from rollyard.policy.evidence import level_of
from rollyard.trajectory.trajectory import Node


class Recorded(Protocol):
    """A trajectory, as far as a replay needs it."""

    @property
    def records(self) -> Sequence[CallRecord]: ...
    def messages(self, call_id: str) -> tuple[Message, ...]: ...
    def answer(self, call_id: str) -> Node | None: ...
    def prompt_ids(self, call_id: str) -> array[int] | None: ...


class Mismatch(msgspec.Struct, frozen=True):
    """A call that differs from the recording: what it was answered as, and the difference of the messages."""

    call_id: str
    recorded: str | None
    diff: str


class RecordedExchange(msgspec.Struct, frozen=True):
    record: CallRecord
    messages: tuple[Message, ...]
    reply: Reply

    @property
    def depth(self) -> tuple[str, int]:
        return self.record.kind, answers_in(self.messages)


def replay(recorded: Recorded, *, strict: bool = True) -> Replay:
    takes = [
        RecordedExchange(record, recorded.messages(record.id), reply_from(record, node, recorded.prompt_ids(record.id)))
        for record in recorded.records
        if (node := recorded.answer(record.id)) is not None
    ]
    if not takes:
        raise ConfigError("the recording holds no answered call")
    return Replay(takes, strict=strict)


class Replay:
    """A `Policy`. `mismatches` lists the calls that differed from the recording. Whatever the seed, it says the same."""

    honours = frozenset({"seed"})

    def __init__(self, takes: Sequence[RecordedExchange], *, strict: bool) -> None:
        self.strict = strict
        self.mismatches: list[Mismatch] = []
        self._takes = takes
        self._exact: dict[bytes, list[RecordedExchange]] = {}
        for take in takes:
            self._exact.setdefault(chain_of(take.record.tools_digest, take.messages), []).append(take)
        self._given: dict[str, Counter[str]] = {}

    async def __call__(self, call: Call) -> Reply:
        given = self._given.setdefault(call.rollout_id, Counter())
        found = self._exact.get(chain_of(tools_digest_of(call), call.messages))
        take = least_given(found, given) if found else self._find_differing(call, given)
        given[take.record.id] += 1
        now = time.time()
        return msgspec.structs.replace(take.reply, started_at=now, finished_at=now)

    def _find_differing(self, call: Call, given: Counter[str]) -> RecordedExchange:
        depth = (call.kind, answers_in(call.messages))
        near = [take for take in self._takes if take.depth == depth]
        nearest = least_given(near, given) if near else None
        before = nearest.messages if nearest is not None else self._takes[-1].messages
        diff = difference(before, call.messages) or "the messages are the same; the tools offered differ"
        self.mismatches.append(Mismatch(call.id, nearest.record.id if nearest else None, diff))
        if self.strict or nearest is None:
            raise PolicyError(f"the call is not in the recording:\n{diff}", hint="strict=False answers by position")
        return nearest

    async def closed(self, rollout_id: str) -> None:
        self._given.pop(rollout_id, None)

    async def aclose(self) -> None:
        return None


def chain_of(tools: bytes, messages: Sequence[Message]) -> bytes:
    """One digest of the tools and all messages."""
    return hashlib.blake2b(b"".join((tools, *(m.digest for m in messages))), digest_size=16).digest()


def tools_digest_of(call: Call) -> bytes:
    """The digest of a call's tools, as a record has it: empty where there are none."""
    return call.tools_digest or (tools_digest(call.tools) if call.tools else b"")


def least_given(takes: Sequence[RecordedExchange], given: Counter[str]) -> RecordedExchange:
    """Equal requests were answered one after the other; they are again. Past the last, the last stands."""
    return next((take for take in takes if not given[take.record.id]), takes[-1])


def answers_in(messages: Sequence[Message]) -> int:
    return sum(1 for message in messages if message.role == "assistant")


def reply_from(record: CallRecord, node: Node, prompt: array[int] | None) -> Reply:
    reply = Reply(
        message=node.message,
        finish=record.finish or "stop",
        stop_reason=record.stop_reason,
        usage=record.usage,
        model=record.model_served,
        prompt_ids=prompt,
        completion_ids=node.ids,
        logprobs=node.logprobs,
        prompt_source=record.prompt_source,
        version_start=record.version_start,
        version_end=record.version_end,
        spans=node.spans,
        sampling=record.effective,
        engine={"kind": "replay", "call": record.id},
        trainable=False,
        flaws=(REPLAYED,),
    )
    return msgspec.structs.replace(reply, capture=level_of(reply))


def difference(before: Sequence[Message], after: Sequence[Message]) -> str:
    """A unified diff of two conversations, message by message."""
    return "\n".join(difflib.unified_diff(lines_of(before), lines_of(after), "recorded", "asked", lineterm="", n=2))


def lines_of(messages: Sequence[Message]) -> list[str]:
    lines: list[str] = []
    for number, message in enumerate(messages):
        lines.append(f"--- {number} {message.role}")
        lines.extend(message.text.splitlines())
        for part in message.parts:
            if isinstance(part, ToolCall):
                lines.append(f"call {part.name} {part.arguments}")
            elif isinstance(part, ToolResult):
                lines.append(f"result of {part.call_id}")
                lines.extend(line for p in part.parts for line in getattr(p, "text", "").splitlines())
    return lines


def replay_by_id(
    rollout_id: str, *, store: str | None = None, strict: bool = True, recorded: Recorded | None = None
) -> Replay:
    """`replay:ID#store=FILE&strict=false` of the command line. A run reads `recorded` out of that store, or of its own."""
    if recorded is None:
        raise ConfigError(
            f"the recording of {rollout_id!r} is in a store", hint="a run reads it; in Python, use replay()"
        )
    return replay(recorded, strict=strict)
