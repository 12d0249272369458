"""AReaL 1.0: its tensor dict, one per row with a batch dimension of one, as lists (`{k: torch.tensor(v) ...}` makes tensors).

`versions` is -1 on every token that was not sampled for training; AReaL's decoupled loss reads staleness per token from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import answers_of, rows_of
from rollyard.trajectory.samples import Sample


def concat(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """AReaL's `concat` export: a row per branch."""
    return [tensors(row) for row in rows_of(rollouts)]


def individual(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """AReaL's `individual` export: a row per call."""
    found: list[dict[str, Any]] = []
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        for answer in answers_of(rollout):
            before, size = len(answer.prompt), len(answer.prompt) + len(answer.ids)
            found.append(
                {
                    "input_ids": [[*answer.prompt, *answer.ids]],
                    "loss_mask": [[0] * before + [1] * len(answer.ids)],
                    "logprobs": [[0.0] * before + list(answer.logprobs)],
                    "versions": [[-1] * before + list(answer.versions)],
                    "attention_mask": [[True] * size],
                    "rewards": [rollout.reward],
                }
            )
    return found


def tensors(row: Sample) -> dict[str, Any]:
    return {
        "input_ids": [list(row.ids)],
        "loss_mask": [list(row.mask)],
        "logprobs": [list(row.logprobs)],
        "versions": [list(row.versions)],
        "attention_mask": [[True] * len(row.ids)],
        "rewards": [row.reward],
    }
