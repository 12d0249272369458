"""Per-turn records of a trajectory: what people read and GRPO scripts take (messages, tokens, ids, logprobs, finish)."""

from __future__ import annotations

from typing import Any

import msgspec

from rollyard.core.message import Message
from rollyard.core.rollout import Turn
from rollyard.trajectory.trajectory import Trajectory


def turns(trajectory: Trajectory | None) -> list[Turn]:
    """One `Turn` for each answered call, in commit order; [] where nothing was captured (`black_box`)."""
    if trajectory is None:
        return []
    out: list[Turn] = []
    for record in trajectory.records:
        answer = trajectory.answer(record.id)
        if answer is None:
            continue
        history = trajectory.messages(record.id)
        out.append(
            Turn(
                call_id=record.id,
                kind=record.kind,
                request={
                    "model": record.model_requested,
                    "dialect": record.dialect,
                    "sampling": msgspec.to_builtins(record.requested),
                },
                response=_message_fields(answer.message),
                messages=[_message_fields(message) for message in history],
                completion_tokens=list(answer.texts),
                completion_ids=list(answer.ids) if answer.ids is not None else None,
                logprobs=list(answer.logprobs) if answer.logprobs is not None else None,
                finish_reason=record.finish,
                latency_s=_latency(record.received_at, record.finished_at),
            )
        )
    return out


def _message_fields(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.thinking:
        shown["reasoning"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    if message.tool_results:
        result = message.tool_results[0]
        shown["tool_call_id"] = result.call_id
        shown["content"] = "".join(getattr(part, "text", "") for r in message.tool_results for part in r.parts)
    return shown


def _latency(received: float, finished: float | None) -> float | None:
    return finished - received if finished is not None and received else None
