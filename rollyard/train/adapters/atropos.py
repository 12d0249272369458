"""Atropos: one group for POST `/scored_data`.

Masks hold the token id where it trains and -100 elsewhere; `inference_logprobs` is 1.0 where none was sampled. The trainer
would take a baseline over `scores`, one per row; `advantages` are per token and already over rollouts, so they are sent too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import Advantages, advantages_of, rows_of, spread, tree_place

IGNORED = -100
NOT_SAMPLED = 1.0


def scored_data(
    rollouts: Iterable[Rollout], *, advantages: Advantages | None = None, env_id: int | None = None
) -> dict[str, Any]:
    """`rollouts` are those of one group. `env_id` is the number `/register-env` gave."""
    rows = rows_of(rollouts)
    by = advantages_of(rows, advantages)
    return {
        "tokens": [list(row.ids) for row in rows],
        "masks": [[id if bit else IGNORED for id, bit in zip(row.ids, row.mask, strict=True)] for row in rows],
        "scores": [row.reward for row in rows],
        "advantages": [list(spread(row, by[row.rollout_id])) for row in rows],
        "inference_logprobs": [
            [logprob if bit else NOT_SAMPLED for logprob, bit in zip(row.logprobs, row.mask, strict=True)]
            for row in rows
        ],
        "overrides": [
            {"rollout_id": row.rollout_id, "row": row.index, "rows": row.count, **tree_place(row)} for row in rows
        ],
        "group_overrides": {},
        "env_id": env_id,
    }
