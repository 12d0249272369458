"""slime and miles: `Sample.from_dict` takes these; one list per rollout, as their rollout functions return them.

Rows of one rollout share `rollout_id`, by which the loss is normalised, and `group_index`, by which rewards are compared.
slime counts rewards per sample unless it is told otherwise: rows after the first carry the rollout's advantage through
`rollout_id`, and `train_metadata` says how many rows share it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import scored_rows, tree_place, versions_of
from rollyard.trajectory.samples import Sample


def rollout_groups(rollouts: Iterable[Rollout]) -> list[list[dict[str, Any]]]:
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    groups = {name: number for number, name in enumerate(dict.fromkeys(r.group_id or r.task.id for r in scored))}
    out: list[list[dict[str, Any]]] = []
    index = 0
    for number, rollout in enumerate(scored):
        rows = scored_rows(rollout)
        group = groups[rollout.group_id or rollout.task.id]
        prompt = rollout.task.instruction
        out.append(
            [row_sample(row, prompt=prompt, group=group, index=index + row.index, rollout=number) for row in rows]
        )
        index += len(rows)
    return out


def row_sample(row: Sample, *, prompt: Any, group: int, index: int, rollout: int) -> dict[str, Any]:
    at = row.prompt_len
    return {
        "group_index": group,
        "index": index,
        "rollout_id": rollout,
        "prompt": prompt,
        "tokens": list(row.ids),
        "response_length": len(row.ids) - at,
        "reward": row.reward,
        "loss_mask": list(row.mask[at:]),
        "rollout_log_probs": list(row.logprobs[at:]),
        "weight_versions": [str(version) for version in versions_of(row)],
        "remove_sample": False,
        "status": "truncated" if row.truncated else "completed",
        "metadata": {"rollout": row.rollout_id, "task": row.task_id, "kind": row.kind},
        "train_metadata": {"row": row.index, "rows": row.count, **tree_place(row)},
        "session_id": row.rollout_id,
    }
