"""OpenPipe ART 0.5: `rollout` makes an `art.Trajectory` of one attempt, for `art.gather_trajectory_groups`.

    art.TrajectoryGroup(rollout(model, task, agent="opencode") for _ in range(8))

ART's inference server answers through our gate, which keeps the ids of each token where the server gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.train.adapters.art import trajectories
from rollyard.train.plugins.import_trainer import import_trainer
from rollyard.train.plugins.served_rollouts import RolloutsFailed, ServedRollouts, TaskRow

_art: Any = import_trainer("art")
_choice: Any = import_trainer("openai.types.chat.chat_completion").Choice


async def rollout(model: Any, task: TaskRow, *, agent: str, options: Mapping[str, Any] | None = None) -> Any:
    """In this process, with the model's own inference server."""
    row: dict[str, Any] = msgspec.json.decode(task) if isinstance(task, str) else dict(task)
    if not model.inference_base_url:
        raise ConfigError("the model has no inference server yet", hint="await model.register(backend) first")
    given: dict[str, Any] = {"base_url": model.inference_base_url, "key": model.inference_api_key or "none"}
    done = await run_rollout(row, agent=agent, model=model.get_inference_name(), **given, **(options or {}))
    if done.reward is None:
        raise RolloutsFailed(f"rollout {done.id} has no verdict: {done.error or 'the task has no verifier'}")
    (fields,) = trajectories([done], choice=_choice.model_validate)
    return _art.Trajectory(**fields)


async def served_group(rollouts: ServedRollouts, task: TaskRow, *, attempts: int) -> Any:
    """A whole group of a server's rollouts; those without a verdict are the group's exceptions."""
    rows, left_out = await rollouts.rows(task, "art", attempts=attempts)
    lost = [RolloutsFailed(f"attempt {one['attempt']}: {', '.join(one['reasons'])}") for one in left_out]
    return _art.TrajectoryGroup([_trajectory(fields) for fields in rows], exceptions=lost)


def _trajectory(fields: dict[str, Any]) -> Any:
    """ART trains what is a `Choice`, and over HTTP choices are plain."""
    histories = [{**one, "messages_and_choices": _history(one)} for one in fields["additional_histories"]]
    return _art.Trajectory(**{**fields, "messages_and_choices": _history(fields), "additional_histories": histories})


def _history(fields: Mapping[str, Any]) -> list[Any]:
    found = fields["messages_and_choices"]
    return [_choice.model_validate(one) if "finish_reason" in one else one for one in found]
