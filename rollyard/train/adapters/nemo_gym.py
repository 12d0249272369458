"""NeMo Gym: a `TokenEntry` per call that trains; its builders merge them by prefix into rows.

Empty answers are not written: its builder drops them, and with them the place of what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import TrainedCall, answers_of


def token_entries(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    return [
        _entry(rollout, answer) for rollout in rollouts if rollout.reward is not None for answer in answers_of(rollout)
    ]


def _entry(rollout: Rollout, answer: TrainedCall) -> dict[str, Any]:
    items = _items(answer)
    tokens = {
        "prompt_token_ids": list(answer.prompt),
        "generation_token_ids": list(answer.ids),
        "generation_log_probs": list(answer.logprobs),
    }
    return {
        "schema_version": 1,
        "rollout_id": rollout.id,
        "model_call_id": answer.record.id,
        "model": answer.record.model_served or answer.record.model_requested,
        **tokens,
        "output_items": [*items[:-1], {**items[-1], **tokens}],
        "token_item_index": len(items) - 1,
        "created_at": answer.record.finished_at or answer.record.received_at,
    }


def _items(answer: TrainedCall) -> list[dict[str, Any]]:
    """The answer as items of the Responses API; the last one carries the tokens."""
    message: Message = answer.message
    items: list[dict[str, Any]] = []
    if message.thinking:
        summary = [{"type": "summary_text", "text": message.thinking}]
        items.append({"type": "reasoning", "id": f"rs_{answer.record.id}", "summary": summary})
    if message.text or not message.tool_calls:
        content = [{"type": "output_text", "text": message.text, "annotations": []}]
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.record.id}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    items += [
        {"type": "function_call", "id": f"fc_{c.id}", "call_id": c.id, "name": c.name, "arguments": c.arguments}
        for c in message.tool_calls
    ]
    return items
