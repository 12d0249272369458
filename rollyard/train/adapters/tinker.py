"""Tinker: fields of a `Datum`. Inputs are all tokens but the last; targets, logprobs, advantages and mask are shifted by one,
so that each stands beside the token it predicts. `mask` is for your own sums: Tinker's losses know no such input and refuse
it, and an advantage of zero masks a token there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import Advantages, advantages_of, rows_of, spread
from rollyard.trajectory.samples import Sample


def data(rollouts: Iterable[Rollout], *, advantages: Advantages | None = None) -> list[dict[str, Any]]:
    """`Datum(model_input=ModelInput.from_ints(d["model_input"]), loss_fn_inputs=d["loss_fn_inputs"])`, one per row."""
    return rows_data(rows_of(rollouts), advantages=advantages)


def rows_data(rows: Sequence[Sample], *, advantages: Advantages | None = None) -> list[dict[str, Any]]:
    by = advantages_of(rows, advantages)
    return [
        {
            "model_input": list(row.ids[:-1]),
            "loss_fn_inputs": {
                "target_tokens": list(row.ids[1:]),
                "logprobs": list(row.logprobs[1:]),
                "advantages": list(spread(row, by[row.rollout_id])[1:]),
            },
            "mask": [float(bit) for bit in row.mask[1:]],
        }
        for row in rows
    ]
