"""A rollout that another system recorded, and how it is kept: as if its calls had come through the gate.

No token is made up: ids and logprobs are kept only where the file has them for the prompt and for every token of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.call import Call, Reply, Usage, floats, ids
from rollyard.core.ids import new_id
from rollyard.core.message import Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from rollyard.core.rollout import Failure, Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store.store import Store
from rollyard.trajectory.trajectory import Trajectory

UNKNOWN = "unknown"


class ForeignCall(msgspec.Struct, frozen=True, kw_only=True):
    """One answered model call. The three lists of tokens are kept together or not at all."""

    prompt: tuple[Message, ...]
    answer: Message
    model: str = UNKNOWN
    usage: Usage = Usage()
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    at: float = 0.0


class ForeignRollout(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    instruction: str
    attempt: int = 0
    agent: str = UNKNOWN
    agent_version: str | None = None
    model: str = UNKNOWN
    calls: tuple[ForeignCall, ...] = ()
    verdict: Verdict | None = None
    error: str | None = None
    started_at: float = 0.0
    wall_s: float = 0.0
    source: str = ""  # what the other system calls it


async def keep_all(store: Store, run_id: str, found: Iterable[ForeignRollout], kind: str) -> int:
    count = 0
    for one in found:
        await _keep(store, run_id, one, kind)
        count += 1
    return count


async def _keep(store: Store, run_id: str, one: ForeignRollout, kind: str) -> None:
    rollout_id = new_id("ro")
    trajectory = Trajectory(rollout_id)
    for call in one.calls:
        added = trajectory.add(_call(call, rollout_id), _reply(call))
        await store.commit(added.record, added.nodes, added.blobs)
    totals = {"prompt_tokens": 0, "completion_tokens": 0}
    for call in one.calls:
        totals["prompt_tokens"] += call.usage.prompt_tokens or 0
        totals["completion_tokens"] += call.usage.completion_tokens or 0
    failure = None
    if one.error is not None:
        failure = Failure(
            boundary="agent", cause="ImportedError", message=one.error, stage="wait", retry=False, grade=True,
            trainable=False,
        )  # fmt: skip
    rollout = Rollout(
        id=rollout_id,
        run_id=run_id,
        task=Task(id=one.task_id, instruction=one.instruction),
        attempt=one.attempt,
        agent=one.agent,
        agent_version=one.agent_version,
        labels={"policy": one.model, "imported": kind, "source": one.source},
        status="completed" if failure is None else "agent_error",
        verdict=one.verdict,
        failure=failure,
        calls=len(one.calls),
        usage=totals,
        started_at=one.started_at,
        wall_s=one.wall_s,
    )
    await store.commit_rollout(rollout)


def _call(call: ForeignCall, rollout_id: str) -> Call:
    return Call(
        id=new_id("call"), rollout_id=rollout_id, dialect="chat", model=call.model, messages=call.prompt, received_at=call.at
    )  # fmt: skip


def _reply(call: ForeignCall) -> Reply:
    finish = "tool_calls" if call.answer.tool_calls else "stop"
    reply = Reply(message=call.answer, finish=finish, usage=call.usage, model=call.model, finished_at=call.at)
    answered, logprobs = call.completion_ids, call.logprobs
    if call.prompt_ids is None or answered is None or logprobs is None or len(answered) != len(logprobs):
        return reply
    return msgspec.structs.replace(
        reply,
        prompt_ids=ids(call.prompt_ids),
        completion_ids=ids(answered),
        logprobs=floats(logprobs),
        capture="tokens",
        prompt_source="engine",
    )


def parts_of(content: Any) -> tuple[Part, ...]:
    """Content as most systems write it: text, or a list of parts. What is neither text, reasoning nor a picture is its JSON."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),) if content else ()
    return tuple(_part(part) for part in content)


def _part(part: Mapping[str, Any]) -> Part:
    match part.get("type"):
        case "text":
            return Text(str(part.get("text", "")))
        case "reasoning":
            return Thinking(str(part.get("reasoning", "")), redacted=bool(part.get("redacted")))
        case "image":
            source = part.get("source")
            where = str(source.get("path", "")) if isinstance(source, Mapping) else str(part.get("image", ""))
            return Image(url=where)
        case _:
            return Text(msgspec.json.encode(part).decode())


def tool_result(call_id: str, content: Any, *, failed: bool = False) -> Message:
    shown = tuple(part for part in parts_of(content) if isinstance(part, Text | Image))
    return Message("tool", (ToolResult(call_id, shown, is_error=failed),))


def tool_call(id: str, name: str, arguments: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(id, name, text)
