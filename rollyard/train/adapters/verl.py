"""verl 0.9: fields of `AgentLoopOutput`, one per row.

A loop that runs one rollout returns `outputs([rollout])`, or its first entry where the worker takes one output only. verl
puts `reward_score` on the last token of each; `extra_fields` name the rollout, so that a baseline can be taken over rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import rows_of, tree_place, versions_of
from rollyard.trajectory.samples import Sample


def outputs(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    return [output(row) for row in rows_of(rollouts)]


def output(row: Sample) -> dict[str, Any]:
    at, versions = row.prompt_len, versions_of(row)
    return {
        "prompt_ids": list(row.ids[:at]),
        "response_ids": list(row.ids[at:]),
        "response_mask": list(row.mask[at:]),
        "response_logprobs": list(row.logprobs[at:]),
        "reward_score": row.reward,
        "num_turns": sum(span.role != "system" for span in row.spans),
        "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0},
        "extra_fields": {
            "rollout_id": row.rollout_id,
            "group_id": row.group_id or row.task_id,
            "row": row.index,
            "rows": row.count,
            **tree_place(row),
            "kind": row.kind,
            "min_global_steps": versions[0] if versions else None,
            "max_global_steps": versions[-1] if versions else None,
        },
    }
