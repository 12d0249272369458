"""SkyRL: a `GeneratorOutput`, concatenated (a row per branch) or step-wise (a row per call).

In both, the rows of one rollout stand together under one `TrajectoryID` and the reward lies on the last token of the last of
them (`is_last_step`), since SkyRL takes its baseline there and copies the advantage to the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.train.adapters.rows import answers_of, scored_rows
from rollyard.trajectory.samples import Sample

_KEYS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "is_last_step",
)
_Row = tuple[list[int], list[int], list[int], list[float], str]  # prompt, response, mask, logprobs, why it stopped


def generator_output(rollouts: Iterable[Rollout], *, step_wise: bool = False) -> dict[str, Any]:
    """The TypedDict as a dict; a trajectory id is `{"instance_id", "repetition_id"}`, the fields of SkyRL's `TrajectoryID`."""
    out: dict[str, Any] = {key: [] for key in _KEYS}
    for rollout in rollouts:
        if rollout.reward is None:
            continue
        rows = _steps(rollout) if step_wise else [_branch(row) for row in scored_rows(rollout)]
        name = {"instance_id": rollout.group_id or rollout.task.id, "repetition_id": rollout.attempt}
        _append(out, rows, rollout.reward, name)
    return {**out, "rollout_metrics": None}


def rows_output(rollouts: Sequence[tuple[Any, Sequence[Sample]]], *, pad_id: int = 0) -> dict[str, Any]:
    """The same of rows, for rollouts with the trajectory ids that SkyRL gave them, in its order. One that has no row holds its
    place with a masked token: the caller masks its group, for SkyRL's baseline knows no missing reward."""
    out: dict[str, Any] = {key: [] for key in _KEYS}
    for name, rows in rollouts:
        if not rows:
            _append(out, [([pad_id], [pad_id], [0], [0.0], "error")], 0.0, name)
            continue
        assert rows[0].reward is not None, "only scored rollouts have rows"
        _append(out, [_branch(row) for row in rows], rows[0].reward, name)
    return {**out, "rollout_metrics": None}


def _append(out: dict[str, Any], rows: Sequence[_Row], reward: float, name: Any) -> None:
    for number, (prompt, response, mask, logprobs, stop) in enumerate(rows):
        last = number == len(rows) - 1
        rewards = [0.0] * len(response)
        if last:
            rewards[-1] = reward
        for key, value in zip(_KEYS, (prompt, response, rewards, mask, stop, logprobs, name, last), strict=True):
            out[key].append(value)


def _branch(row: Sample) -> _Row:
    at, stop = row.prompt_len, "length" if row.truncated else "stop"
    return list(row.ids[:at]), list(row.ids[at:]), list(row.mask[at:]), list(row.logprobs[at:]), stop


def _steps(rollout: Rollout) -> list[_Row]:
    return [
        (
            list(answer.prompt),
            list(answer.ids),
            [1] * len(answer.ids),
            list(answer.logprobs),
            "length" if answer.record.finish == "length" else "stop",
        )
        for answer in answers_of(rollout)
    ]
