"""Evaluation: agents x models x tasks x attempts through one queue, with budgets, resumable; and the quality of one task.

`evaluate` is a run whose policies have names and prices. `evaluate_task` is for a loop that generates tasks: it asks several
models k times and says whether the task can teach, tells models apart, or has a broken verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal

from rollyard.core.agent import DEFAULT_AGENT, Agent
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.protocols import Backend, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.scratch import scratch
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.runs.display.progress import Display
from rollyard.runs.report.quality import ModelScores, TaskQuality, judge_task
from rollyard.runs.report.report import Report
from rollyard.runs.rollout.open_policy import open_policy
from rollyard.runs.run.config import RunConfig, load
from rollyard.runs.run.drive import carry_out
from rollyard.runs.run.fleet_job import FleetJob, evaluate_remotely
from rollyard.runs.run.run import Run
from rollyard.store import Store
from rollyard.tasks.rows import as_task
from rollyard.tasks.verifiers.python import Check

Answers = Policy | str


async def evaluate(
    config: RunConfig | str,
    *,
    store: Store,
    display: Display | None = None,
    resume: str | None = None,
    answering: Mapping[str, Policy] | None = None,
    sandbox: str | Backend | None = None,
) -> Report:
    """Run the whole matrix (or what is left of `resume`) and report. Attempts that a budget left undone stay owed."""
    if isinstance(config, str):
        config = load(config)
    return await carry_out(config, store=store, display=display, resume=resume, answering=answering, sandbox=sandbox)


async def evaluate_task(
    task: str | Mapping[str, Any] | Task,
    models: Mapping[str, Answers] | Sequence[str],
    *,
    attempts: int = 8,
    agent: str | Agent = DEFAULT_AGENT,
    verifier: Check | None = None,
    sandbox: str | Backend = "local",
    parallel: int | Literal["auto"] = 4,
    store: Store | None = None,
    remote: FleetJob | None = None,
    **fields: Any,
) -> TaskQuality:
    """Ask each model `attempts` times and judge the task by the scores. Cancelling it ends every rollout at once.

    `task` is a prompt with `verify` commands or a verifier (`{"instruction": ..., "verify": [...]}`), or a `Task`. `models`
    are policies by name; for a `remote` job, model ids as `provider/model`."""
    if isinstance(models, str):
        raise ConfigError("models are policies by name, not one string", hint='{"name": "upstream:URL"}')
    if not models:
        raise ConfigError("evaluate_task needs at least one model")
    chosen = as_task(task)
    if remote is not None:
        if fields or store is not None or verifier is not None:
            raise ConfigError(
                "a remote evaluation takes models, attempts and the job alone; its verifier is in the job"
            )
        return await evaluate_remotely(chosen, list(models), attempts, remote)
    if not isinstance(models, Mapping):
        raise ConfigError("a local evaluation needs policies by name", hint='{"name": ry.policy.upstream(URL, MODEL)}')
    async with AsyncExitStack() as stack:
        if store is None:
            folder = stack.enter_context(scratch("eval"))
            store = await stack.enter_async_context(Store.open(folder / "runs.db"))
        named: dict[str, Policy] = {}
        for name, answers in models.items():
            named[name] = await open_policy(answers, store=store) if isinstance(answers, str) else answers
            if isinstance(answers, str):
                stack.push_async_callback(named[name].aclose)
        gate = await stack.enter_async_context(Gate(next(iter(named.values())), log=store))
        labels = {"evaluation": new_id("ev")}
        async with Run(
            [chosen], agent=agent, policies=named, attempts=attempts, parallel=parallel, sandbox=sandbox, gate=gate,
            store=store, verifier=verifier, labels=labels, **fields,
        ) as run:  # fmt: skip
            done = [rollout async for rollout in run]
    return judge_task(chosen.id, scores(done, list(named)), verifier_errors=_verifier_errors(done))


def scores(done: Sequence[Rollout], models: Sequence[str]) -> list[ModelScores]:
    return [
        ModelScores(
            model=model,
            rewards=tuple(r.reward for r in done if r.labels.get("policy") == model and r.reward is not None),
            errors=tuple(r.error or "not scored" for r in done if r.labels.get("policy") == model and r.reward is None),
        )
        for model in models
    ]


def _verifier_errors(done: Sequence[Rollout]) -> int:
    return sum(
        r.reward is None
        and (
            (r.failure is not None and r.failure.boundary == "verifier")
            or (r.failure is None and r.verdict is not None)
        )
        for r in done
    )
