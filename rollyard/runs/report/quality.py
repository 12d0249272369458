"""What a set of scores says about a *task*: whether it can teach, whether it tells models apart, whether its verifier works.

Scores are per model. An attempt without a reward is an error and is counted apart; it is never a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import msgspec

from rollyard.runs.report import statistics
from rollyard.runs.report.statistics import NOTHING, Interval, Separation

Judgement = Literal["too easy", "too hard", "learnable", "broken verifier", "not enough scores"]
EASY, HARD = 0.95, 0.05
ERRORS_TOLERATED = 0.5


class ModelScores(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    rewards: tuple[float, ...]
    errors: tuple[str, ...] = ()  # why attempts have no reward

    @property
    def mean(self) -> Interval:
        return statistics.bootstrap_mean(self.rewards)


class TaskQuality(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    models: tuple[ModelScores, ...]
    learnability: Interval
    separation: tuple[Separation, ...]
    judgement: Judgement
    why: str
    job_id: str | None = None  # of a remote evaluation

    def scores(self, model: str) -> ModelScores | None:
        """By model id, with or without its provider prefix."""
        return next((found for found in self.models if same_model(found.model, model)), None)


def same_model(first: str, second: str) -> bool:
    """`provider/model` and `model` are the same model; two different providers of one name are not."""
    if first == second:
        return True
    a, b = first.rsplit("/", 1), second.rsplit("/", 1)
    return a[-1] == b[-1] and (len(a) == 1 or len(b) == 1)


def judge_task(task_id: str, models: Sequence[ModelScores], *, verifier_errors: int = 0) -> TaskQuality:
    """`verifier_errors` are attempts the verifier itself failed to score."""
    everything = [reward for model in models for reward in model.rewards]
    attempts = len(everything) + sum(len(model.errors) for model in models)
    judgement, why = _judgement(everything, attempts, verifier_errors)
    return TaskQuality(
        task_id=task_id,
        models=tuple(models),
        learnability=statistics.learnability(everything) if everything else NOTHING,
        separation=tuple(
            statistics.separation(a.model, a.rewards, b.model, b.rewards)
            for a, b in combinations(models, 2)
            if a.rewards and b.rewards
        ),
        judgement=judgement,
        why=why,
    )


def _judgement(rewards: Sequence[float], attempts: int, verifier_errors: int) -> tuple[Judgement, str]:
    if attempts and verifier_errors / attempts > ERRORS_TOLERATED:
        return "broken verifier", f"the verifier gave no score for {verifier_errors} of {attempts} attempts"
    if any(not 0.0 <= reward <= 1.0 for reward in rewards):
        return "broken verifier", "a reward lies outside 0..1"
    if not rewards:
        return "not enough scores", f"none of {attempts} attempts was scored"
    mean = sum(rewards) / len(rewards)
    if mean >= EASY:
        return "too easy", f"mean reward {mean:.2f} over {len(rewards)} attempts"
    if mean <= HARD:
        return "too hard", f"mean reward {mean:.2f} over {len(rewards)} attempts"
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return "not enough scores", f"{len(rewards)} attempts show no variation"
    return "learnable", f"mean reward {mean:.2f} over {len(rewards)} attempts, and they differ"
