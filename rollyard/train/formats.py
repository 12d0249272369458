"""Rows of finished rollouts by the name of the trainer that reads them, as plain values that any language can decode."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollyard.core.errors import UnknownName
from rollyard.core.rollout import Rollout
from rollyard.store.exports.lines import attempt_line, sample_line
from rollyard.train.adapters import (
    agent_lightning,
    areal,
    art,
    atropos,
    nemo_gym,
    openenv,
    openrlhf,
    prime_rl,
    rllm,
    skyrl,
    slime,
    tinker,
    trl,
    verifiers,
    verl,
)
from rollyard.train.adapters.rows import rows_of

Rollouts = Sequence[Rollout]
Write = Callable[[Rollouts], Any]


def _per_rollout(write: Callable[[Rollout], Any]) -> Write:
    """A format that is made of one rollout at a time."""
    return lambda rollouts: [write(rollout) for rollout in rollouts if rollout.reward is not None]


FORMATS: Mapping[str, Write] = {
    "attempts": lambda rollouts: [attempt_line(rollout) for rollout in rollouts],
    "samples": lambda rollouts: [sample_line(row) for row in rows_of(rollouts)],
    "agent_lightning": _per_rollout(agent_lightning.triplets),
    "areal": areal.concat,
    "art": lambda rollouts: art.trajectories(rollouts, choice=dict),
    "atropos": atropos.scored_data,
    "nemo_gym": nemo_gym.token_entries,
    "openenv": _per_rollout(openenv.training_trace),
    "openrlhf": _per_rollout(openrlhf.executions),
    "prime_rl": lambda rollouts: prime_rl.training_samples(rollouts, env_name="rollyard"),
    "rllm": rllm.episodes,
    "skyrl": skyrl.generator_output,
    "slime": slime.rollout_groups,
    "tinker": tinker.data,
    "trl": trl.rollout_samples,
    "verifiers": _per_rollout(verifiers.trace),
    "verl": verl.outputs,
}


def write_rows(name: str, rollouts: Rollouts) -> Any:
    """In the format `name`, without anything that JSON does not have."""
    if name not in FORMATS:
        raise UnknownName("row format", name, tuple(FORMATS))
    return _plain(FORMATS[name](rollouts))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple | array | bytes):
        return [_plain(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value
