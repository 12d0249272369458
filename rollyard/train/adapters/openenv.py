"""OpenEnv 0.10: `TrainingTrace` (what TRL's harness worker trains on) and `TraceEntry` (what its proxy lists).

A turn is one call. A trainer builds sequences from turns itself by exact token prefix, which is how the turns were told apart
here; each has its own `node_id`. Sampled answers that must not train are left out: in a later prompt they are context.
"""

from __future__ import annotations

from typing import Any

from rollyard.core.rollout import Rollout, Turn
from rollyard.gate.rollout_json import chat_messages, trace_entries
from rollyard.train.adapters.rows import TrainedCall, answers_of


def training_trace(rollout: Rollout) -> dict[str, Any]:
    """`TrainingTrace.model_validate` takes it under strict validation. The reward travels apart, from `verify`, so that a
    rollout without one has a trace too."""
    return {"schema_version": 1, "turns": [_turn(answer) for answer in answers_of(rollout, unscored=True)]}


def proxy_trace(rollout: Rollout) -> list[dict[str, Any]]:
    """One `TraceEntry` per answered call, in their order; [] where nothing was captured. The mask is 1 on what trains: all of it
    is 0 for an auxiliary call, and for one whose tokens cannot be proved. What the model server did not give is None: ids where
    it gave logprobs alone, logprobs where it gave text alone. `reward` None is unscored."""
    graph = rollout.trajectory
    if graph is None:
        return []
    wanted = {
        r.id: {"messages": chat_messages(graph.messages(r.id)), "tools": []}
        for r in graph.records
        if r.leaf is not None
    }
    trained = {entry["metadata"]["node_id"]: entry for entry in trace_entries(graph, wanted)}
    return [
        {
            **(trained.get(turn.call_id) or _make_untrained(rollout, turn, wanted[turn.call_id])),
            "completion_tokens": turn.completion_tokens,
            "finish_reason": turn.finish_reason,
            "latency_s": turn.latency_s,
            "reward": rollout.reward,
        }
        for turn in rollout.turns
    ]


def _make_untrained(rollout: Rollout, turn: Turn, wanted: dict[str, Any]) -> dict[str, Any]:
    """A call that was answered and trains nowhere: everything that is known of it."""
    graph = rollout.captured
    record, answer, prompt = graph.record(turn.call_id), graph.answer(turn.call_id), graph.prompt_ids(turn.call_id)
    ids, logprobs = turn.completion_ids, turn.logprobs
    return {
        "request": wanted,
        "response": {
            "choices": [
                {
                    "message": chat_messages((answer.message,))[0] if answer is not None else None,
                    "finish_reason": record.finish,
                }
            ]
        },
        "prompt_token_ids": None if prompt is None else list(prompt),
        "completion_token_ids": ids,
        "per_token_logps": logprobs,
        "loss_mask": None if prompt is None or ids is None else [0] * (len(prompt) + len(ids)),
        "metadata": {
            "node_id": record.id,
            "index": record.seq,
            "kind": record.kind,
            "model": record.model_served or record.model_requested,
            "why": list(record.flaws),
        },
    }


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
