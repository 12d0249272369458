"""Evaluation: agents x models x tasks x attempts through one queue, with budgets, resumable; and the quality of one task.

`evaluate` is a run whose policies have names and prices. `evaluate_task` is for a loop that generates tasks: it asks several
models k times and says whether the task can teach, tells models apart, or has a broken verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio.to_thread
import msgspec

from rollyard import policy as policies
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError
from rollyard.core.ids import new_id
from rollyard.core.protocols import Backend, EventSink, Policy, Verifier
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.runs.config import RunConfig, convert, read_toml
from rollyard.runs.progress import Display
from rollyard.runs.quality import ModelScores, TaskQuality, judge_task
from rollyard.runs.report import Price, Report, summarise_stream
from rollyard.runs.run import Run
from rollyard.runs.stages import nowhere
from rollyard.store import Store
from rollyard.tasks.rows import as_task
from rollyard.tasks.taskset import Taskset

Answers = Policy | str


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run` is the matrix; `prices` are money per million tokens by policy name, and `max_cost` ends the run once spent."""

    run: RunConfig
    prices: Mapping[str, Price] = {}
    max_cost: float | None = None

    def __post_init__(self) -> None:
        for name in self.prices:
            if name not in self.run.policies:
                raise ConfigError(f"prices names the policy {name!r}, which the evaluation does not have")
        if self.max_cost is not None and not self.prices:
            raise ConfigError(
                "max_cost needs prices", hint="give [prices.NAME] prompt and completion per million tokens"
            )


def load(path: str) -> EvalConfig:
    """A TOML file with a run's fields at the top, and `[prices.NAME]` and `max_cost` beside them."""
    values = read_toml(path)
    own = {name: values.pop(name) for name in ("prices", "max_cost") if name in values}
    return msgspec.convert({**own, "run": convert(values, path)}, EvalConfig, from_attributes=True)


class Spending:
    """Money and tokens as rollouts end; `over` once the budget is used up."""

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self.cost = 0.0

    def add(self, rollout: Rollout) -> None:
        price = self._config.prices.get(rollout.labels.get("policy", ""))
        if price is not None:
            prompt, completion = rollout.usage.get("prompt_tokens") or 0, rollout.usage.get("completion_tokens") or 0
            self.cost += (prompt * price.prompt + completion * price.completion) / 1e6

    @property
    def over(self) -> bool:
        return self._config.max_cost is not None and self.cost >= self._config.max_cost


async def evaluate(
    config: EvalConfig | RunConfig | str,
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
    if isinstance(config, RunConfig):
        config = EvalConfig(run=config)
    run_config = config.run
    async with AsyncExitStack() as stack:
        named = dict(answering or {}) or await _answering(stack, run_config)
        tasks = await anyio.to_thread.run_sync(
            partial(Taskset.load, run_config.tasks, allow_network=run_config.allow_network)
        )
        gate = await stack.enter_async_context(Gate(next(iter(named.values())), log=store))
        spending = Spending(config)
        sink: EventSink = display.event if display is not None else nowhere
        async with Run(
            tasks, gate=gate, store=store, config=run_config, policies=named, resume=resume, sink=sink, sandbox=sandbox
        ) as run:
            if display is not None:
                display.begin(run.id, run.owed, run.done)
            async for rollout in run:
                spending.add(rollout)
                if display is not None:
                    display.rollout(rollout)
                if spending.over:
                    break
        return await summarise_stream(run.id, store.rollouts(run.id), _by_line(config))


def _by_line(config: EvalConfig) -> dict[str, Price]:
    """Prices under the names that a report's lines have."""
    return {f"{agent} / {name}": price for agent in config.run.agents for name, price in config.prices.items()}


async def _answering(stack: AsyncExitStack, config: RunConfig) -> dict[str, Policy]:
    if not config.policies:
        raise ConfigError("an evaluation needs policies", hint='[policies] NAME = "upstream:URL"')
    made: dict[str, Policy] = {}
    for name, text in config.policies.items():
        made[name] = (
            policies.parse(text, model=config.model, key_env=config.key_env) if "://" in text else policies.parse(text)
        )
        stack.push_async_callback(made[name].aclose)
    return made


async def evaluate_task(
    task: str | Mapping[str, Any] | Task,
    models: Mapping[str, Answers],
    *,
    attempts: int = 8,
    agent: str | Agent = "shell-agent",
    verifier: Verifier | None = None,
    sandbox: str | Backend = "local",
    parallel: int = 4,
    store: Store | None = None,
    **fields: Any,
) -> TaskQuality:
    """Ask each model `attempts` times and judge the task by the scores. Cancelling it ends every rollout at once.

    `task` is a prompt with `verify` commands or a verifier (`{"instruction": ..., "verify": [...]}`), or a `Task`."""
    if not models:
        raise ConfigError("evaluate_task needs at least one model")
    chosen = as_task(task)
    async with AsyncExitStack() as stack:
        if store is None:
            scratch = stack.enter_context(TemporaryDirectory(prefix="rollyard-eval-"))
            store = await stack.enter_async_context(Store.open(Path(scratch) / "runs.db"))
        named: dict[str, Policy] = {}
        for name, answers in models.items():
            named[name] = policies.parse(answers) if isinstance(answers, str) else answers
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
