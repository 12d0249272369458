"""TRL 1.16: what `GRPOTrainer(rollout_func=...)` returns, and the fields of the asynchronous trainer's `RolloutSample`.

`rollout_func` must give one row per prompt it was handed, so that a rollout with sub-agents or compactions keeps its main row
only, with a warning; the asynchronous worker (`trl_worker`) takes them all. A rollout without a reward holds its place with
one masked token and `env_reward` None, which TRL leaves out of the baseline.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages
from rollyard.train.adapters.rows import (
    Advantages,
    advantages_of,
    graph_of,
    main_row,
    rows_of,
    scored_rows,
    versions_of,
)
from rollyard.trajectory.samples import Sample


def rollout_rows(rollouts: Sequence[Rollout], *, pad_id: int = 0) -> dict[str, list[Any]]:
    """The dict a `rollout_func` returns, for rollouts in the order of its prompts. Pass `env_reward` as a reward function."""
    return main_rows([() if rollout.reward is None else scored_rows(rollout) for rollout in rollouts], pad_id=pad_id)


def main_rows(rollouts: Sequence[Sequence[Sample]], *, pad_id: int = 0) -> dict[str, list[Any]]:
    """The same of rows; a rollout without any holds its place with a masked token."""
    out: dict[str, list[Any]] = {
        key: [] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "env_reward")
    }
    for rows in rollouts:
        if not rows:
            _append(out, [pad_id], [pad_id], [0.0], [0], None)
            continue
        row = main_row(rows)
        if len(rows) > 1:
            lost = sum(other.trained for other in rows) - row.trained
            warnings.warn(
                f"rollout {row.rollout_id} has {len(rows)} rows and rollout_func takes one: "
                f"{lost} sampled tokens do not train",
                stacklevel=2,
            )
        at = row.prompt_len
        _append(out, list(row.ids[:at]), list(row.ids[at:]), list(row.logprobs[at:]), list(row.mask[at:]), row.reward)
    return out


def env_reward(env_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward function that hands on what the verifier said; it only reads the rollouts' own rewards."""
    return list(env_reward)


def rollout_samples(
    rollouts: Iterable[Rollout], *, advantages: Advantages | None = None, version: int = 0, first_group: int = 0
) -> list[dict[str, Any]]:
    """Fields of `RolloutSample`, several per rollout; `trl_worker` makes the objects. Arrays are lists here. `version` is
    that of rows whose policy gave none; groups are numbered from `first_group`."""
    pairs = [(rollout, row) for rollout in rollouts for row in rows_of([rollout])]
    by = advantages_of([row for _, row in pairs], advantages)
    names = dict.fromkeys(row.group_id or row.task_id for _, row in pairs)
    groups = {name: number for number, name in enumerate(names, first_group)}
    return [
        _sample(rollout, row, by[row.rollout_id], groups[row.group_id or row.task_id], version)
        for rollout, row in pairs
    ]


def _sample(rollout: Rollout, row: Sample, advantage: float, group: int, version: int) -> dict[str, Any]:
    """The oldest version of a row is its version: staleness is judged by the worst token."""
    versions, nodes = versions_of(row), graph_of(rollout).nodes
    before = tuple(nodes[span.node].message for span in row.spans if span.end <= row.prompt_len)
    after = tuple(nodes[span.node].message for span in row.spans if span.end > row.prompt_len)
    return {
        "prompt": chat_messages(before),
        "completion": chat_messages(after),
        "input_ids": list(row.ids),
        "completion_mask": list(row.mask),
        "old_log_probs": list(row.logprobs),
        "advantage": advantage,
        "model_version": versions[0] if versions else version,
        "group_id": group,
        "metrics": {"reward": row.reward, "rows": float(row.count), "truncated": float(row.truncated)},
    }


def _append(
    out: dict[str, list[Any]],
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    mask: list[int],
    reward: float | None,
) -> None:
    for key, value in zip(out, (prompt, completion, logprobs, mask, reward), strict=True):
        out[key].append(value)
