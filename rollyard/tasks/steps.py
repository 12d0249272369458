"""Multi-step tasks: whether to go on after a step, and one verdict out of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollyard.core.rollout import Verdict
from rollyard.core.task import Grade, Step, Task
from rollyard.tasks.verifiers.rewards import main_reward


def may_go_on(step: Step, verdict: Verdict) -> bool:
    """A step's `min_reward` gates each key it names; a missing key, or no verdict, is below any minimum."""
    parts = {"reward": verdict.reward, **verdict.parts} if verdict.reward is not None else {}
    return all(parts.get(key, -math.inf) >= least for key, least in (step.min_reward or {}).items())


def combine(task: Task, verdicts: Sequence[Verdict]) -> Verdict:
    """`final`: the last step's verdict. `mean`: for each key the mean over steps with a verdict, a missing key being 0."""
    if not verdicts:
        return Verdict(status="none")
    if task.step_reward == "final":
        return verdicts[-1]
    scored = [verdict for verdict in verdicts if verdict.reward is not None]
    named = {
        f"{step.name}/{n}": ok for step, v in zip(task.steps, verdicts, strict=False) for n, ok in v.checks.items()
    }
    log = "\n".join(f"[{step.name}]\n{v.log}" for step, v in zip(task.steps, verdicts, strict=False))
    commands = tuple(record for verdict in verdicts for record in verdict.commands)
    last = verdicts[-1]
    if not scored:
        return Verdict(status=last.status, grade=last.grade, error=last.error, log=log, commands=commands)
    parts = [dict(verdict.parts) or {"reward": verdict.reward or 0.0} for verdict in scored]
    keys = sorted({key for part in parts for key in part})
    means = {key: math.fsum(part.get(key, 0.0) for part in parts) / len(parts) for key in keys}
    return Verdict(
        reward=main_reward(means),
        grade=weakest(scored),
        parts=means,
        checks=named,
        log=log,
        error=last.error,
        commands=commands,
    )


def weakest(verdicts: Sequence[Verdict]) -> Grade | None:
    """The grade a reader may rely on for all of them."""
    grades = {verdict.grade for verdict in verdicts}
    order: tuple[Grade, ...] = ("live", "shared", "sealed")
    return next((grade for grade in order if grade in grades), None)
