"""OpenEnv 0.10: `TrainingTrace` (what TRL's harness worker trains on) and `TraceEntry` (what its proxy lists).

A turn is one call. A trainer builds sequences from turns itself by exact token prefix, which is how the turns were told apart
here; each has its own `node_id`. Sampled answers that must not train are left out: in a later prompt they are context.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages, trace_entries
from rollyard.train.adapters.rows import TrainedCall, answers_of


def training_trace(rollout: Rollout) -> dict[str, Any]:
    """`TrainingTrace.model_validate` takes it under strict validation. The reward travels apart, from `verify`, so that a
    rollout without one has a trace too."""
    return {"schema_version": 1, "turns": [_turn(answer) for answer in answers_of(rollout, unscored=True)]}


def proxy_trace(rollout: Rollout) -> list[dict[str, Any]]:
    """One `TraceEntry` per captured call that trains; [] where nothing was captured. `reward` None is unscored."""
    if rollout.trajectory is None:
        return []
    graph = rollout.trajectory
    asked = {
        r.id: {"messages": chat_messages(graph.messages(r.id)), "tools": []}
        for r in graph.records
        if r.leaf is not None
    }
    entries = trace_entries(graph, asked)
    return [
        {**entry, "completion_tokens": _texts(rollout, entry["metadata"]["node_id"]), "reward": rollout.reward}
        for entry in entries
    ]


def _turn(answer: TrainedCall) -> dict[str, Any]:
    record = answer.record
    return {
        "node_id": record.id,
        "prompt_token_ids": list(answer.prompt),
        "completion_token_ids": list(answer.ids),
        "per_token_logps": list(answer.logprobs),
        "loss_mask": [0] * len(answer.prompt) + [1] * len(answer.ids),
        "request": {"messages": chat_messages(answer.messages), "tools": []},
        "response": {"choices": [{"message": chat_messages((answer.message,))[0], "finish_reason": record.finish}]},
        "metadata": {
            "kind": record.kind,
            "edge": record.edge,
            "parent": record.parent_call_id,
            "version_start": record.version_start,
            "version_end": record.version_end,
        },
    }


def _texts(rollout: Rollout, call_id: str) -> list[str]:
    answer = rollout.captured.answer(call_id)
    return list(answer.texts) if answer is not None else []
