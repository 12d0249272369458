"""rLLM: an `Episode` per rollout, a `Trajectory` per row, a `Step` per call that trains.

Every trajectory of an episode carries the episode's reward; rLLM groups trajectories by task and `name`, so the sub-agents'
are named after their kind and never share a baseline with the main agent's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollyard.core.rollout import Rollout
from rollyard.gate.rollout_json import chat_messages
from rollyard.train.adapters.rows import TrainedCall, answers_of


def episodes(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    return [_episode(rollout) for rollout in rollouts if rollout.reward is not None]


def _episode(rollout: Rollout) -> dict[str, Any]:
    by_row: dict[int, list[TrainedCall]] = {}
    for answer in answers_of(rollout):
        by_row.setdefault(answer.row.index, []).append(answer)
    return {
        "id": f"{rollout.group_id or rollout.task.id}:{rollout.attempt}",
        "task": {"id": rollout.task.id, "instruction": rollout.task.instruction},
        "is_correct": rollout.reward is not None and rollout.reward > 0,
        "trajectories": [_trajectory(rollout, by_row[index]) for index in sorted(by_row)],
        "metadata": {"rollout_id": rollout.id, "group_id": rollout.group_id},
    }


def _trajectory(rollout: Rollout, answers: list[TrainedCall]) -> dict[str, Any]:
    row = answers[0].row
    steps = [_step(answer, last=answer is answers[-1]) for answer in answers]
    return {
        "uid": f"{rollout.id}:{row.index}",
        "name": row.kind,
        "steps": steps,
        "reward": rollout.reward,
        "signals": {},
    }


def _step(answer: TrainedCall, *, last: bool) -> dict[str, Any]:
    prompt, said = chat_messages(answer.messages), chat_messages((answer.message,))
    known = [version for version in answer.versions if version >= 0]
    return {
        "id": answer.record.id,
        "input": prompt,
        "output": said[0],
        "reward": (answer.row.reward if last else 0.0),
        "done": last,
        "prompt_ids": list(answer.prompt),
        "response_ids": list(answer.ids),
        "logprobs": list(answer.logprobs),
        "chat_completions": [*prompt, *said],
        "weight_version": min(known) if known else None,
    }
