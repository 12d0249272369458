"""verifiers 0.4: a `Trace` of `MessageNode`s, the graph prime-rl trains on (`verifiers.v1.WireTrace.model_validate` takes it).

Both graphs keep a delta of tokens per message, so nodes go over one by one; only branches that train are written. verifiers
leaves it to prime-rl to train a shared answer in the first branch alone. A rollout without a reward has no trace here.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.message import Message
from rollyard.core.node import Node
from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages
from rollyard.train.adapters.rows import graph_of, scored_rows
from rollyard.trajectory.branch import Span
from rollyard.trajectory.samples import Sample


def trace(rollout: Rollout) -> dict[str, Any]:
    graph, rows = graph_of(rollout), scored_rows(rollout)
    nodes: list[dict[str, Any]] = []
    places: dict[int, int] = {}  # our node -> the last of its nodes there
    calls: list[dict[str, Any]] = []
    for row in rows:
        parent: int | None = None
        for span in row.spans:
            if span.node not in places:
                nodes += _nodes(graph.nodes[span.node], row, span, parent, len(nodes))
                places[span.node] = len(nodes) - 1
                if span.sampled and span.call_id is not None:
                    record = graph.record(span.call_id)
                    calls.append({"node": len(nodes) - 1, "model": record.model_served or record.model_requested})
            parent = places[span.node]
    return {
        "id": rollout.id,
        "task": {"type": "rollyard", "data": {"idx": rollout.attempt, "prompt": rollout.task.instruction}},
        "agent": {"config": {}, "name": rollout.agent or "agent"},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": {"score": rollout.reward}},
        "info": {"task_id": rollout.task.id, "group_id": rollout.group_id},
        "is_completed": True,
        "ok": True,
        "stop_condition": rollout.stop_reason,
    }


def _nodes(node: Node, row: Sample, span: Span, parent: int | None, at: int) -> list[dict[str, Any]]:
    """A tool message with several results is several messages there; the delta lies on the last, as it does here."""
    messages = [_assistant(node.message)] if node.message.role == "assistant" else chat_messages((node.message,))
    trains = span.sampled and any(row.mask[span.start : span.end])
    ids = list(row.ids[span.start : span.end])
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        found.append(
            {
                "parent": parent if index == 0 else at + index - 1,
                "message": message,
                "sampled": span.sampled,
                "timestamp": 0.0,
                "token_ids": ids if last else [],
                "mask": [trains] * len(ids) if last else [],
                "logprobs": list(row.logprobs[span.start : span.end]) if trains else [],
            }
        )
    return found


def _assistant(message: Message) -> dict[str, Any]:
    calls = [
        {"id": c.id, "name": c.name, "namespace": c.namespace, "arguments": c.arguments} for c in message.tool_calls
    ]
    return {
        "role": "assistant",
        "content": message.text or None,
        "reasoning_content": message.thinking or None,
        "tool_calls": calls or None,
    }
