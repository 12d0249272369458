"""prime-rl: `TrainingSample`, everything per token and no line between prompt and completion.

The trainer divides its logits by `temperatures`, so a row without a recorded temperature is refused and not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.errors import Untrainable
from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import Advantages, advantages_of, rows_of, spread
from rollyard.trajectory.samples import Sample


def training_samples(
    rollouts: Iterable[Rollout], *, env_name: str, advantages: Advantages | None = None
) -> list[dict[str, Any]]:
    rows = rows_of(rollouts)
    by = advantages_of(rows, advantages)
    return [_sample(row, env_name, by[row.rollout_id]) for row in rows]


def _sample(row: Sample, env_name: str, advantage: float) -> dict[str, Any]:
    if row.temperatures is None:
        raise Untrainable(row.rollout_id, (f"the temperature of row {row.index} is not known",))
    return {
        "token_ids": list(row.ids),
        "mask": [bit == 1 for bit in row.mask],
        "logprobs": list(row.logprobs),
        "temperatures": list(row.temperatures),
        "env_name": env_name,
        "advantages": list(spread(row, advantage)),
    }
