"""From a `RunConfig` to a finished run: opens the store, the policies and the gate, shows progress, and reports.

This is what `rollyard run` does. A run's config is kept in the store, so `resume` needs only the run's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
from msgspec.structs import replace

from rollyard.core.errors import ConfigError
from rollyard.core.log import Log
from rollyard.core.protocols import Backend, Policy
from rollyard.gate import Gate
from rollyard.policy.reference import PolicyText
from rollyard.runs.display.progress import Display
from rollyard.runs.report.price_list import list_prices
from rollyard.runs.report.report import Report, report
from rollyard.runs.rollout.stages import drop_event
from rollyard.runs.run.config import RunConfig, convert
from rollyard.runs.run.descriptors import raise_descriptor_limit
from rollyard.runs.run.executor import Executor, Local
from rollyard.runs.run.policies import check_policies, open_policies
from rollyard.runs.run.run import Run
from rollyard.store import Store
from rollyard.tasks.network import asks_public
from rollyard.tasks.taskset import Taskset
from rollyard.tasks.verifiers.python import Checks


async def drive(
    config: RunConfig | None,
    *,
    store: str,
    display: Display,
    resume: str | None = None,
    executor: Executor | None = None,
) -> Report:
    """Run `config` (or what is left of the run `resume`) to its end and report. Ctrl-C cancels cleanly; attempts stay owed."""
    raise_descriptor_limit()
    if config is not None:
        check_policies(config)
    async with Store.open(store, create=resume is None) as kept:
        if resume is not None:
            kind, resume = await kept.resolve(resume)
            if kind != "run":
                raise ConfigError(f"{resume} is a rollout; a run is resumed")
            config = convert((await kept.get_run(resume)).config, f"run {resume}")
        assert config is not None  # one of the two is given
        with display:
            return await carry_out(config, store=kept, display=display, resume=resume, executor=executor)


async def carry_out(
    config: RunConfig,
    *,
    store: Store,
    display: Display | None = None,
    resume: str | None = None,
    answering: Mapping[str, Policy] | None = None,
    sandbox: str | Backend | None = None,
    verifier: Checks | None = None,
    executor: Executor | None = None,
    tasks: Taskset | None = None,
) -> Report:
    """The whole matrix of a config through one queue. `answering` are policies of the caller's, by name; an executor on other
    machines opens the config's there. `tasks` stand for those that the config names."""
    if resume is None:
        config = _with_list_prices(config)
    async with AsyncExitStack() as stack:
        tasks = tasks or await _load_tasks(config, store)
        say_skipped(tasks)
        _say_closed(tasks, config.network)
        where = executor or Local()
        here = await _in_this_process(stack, config, store, answering) if where.name == Local.name else {}
        async with Run(
            tasks,
            store=store,
            config=config,
            resume=resume,
            sink=display.event if display is not None else drop_event,
            sandbox=sandbox,
            verifier=verifier,
            executor=where,
            **here,
        ) as run:
            if display is not None:
                display.begin(run.id, run.owed, run.done)
            try:
                async for rollout in run:
                    if display is not None:
                        display.rollout(rollout)
            except anyio.get_cancelled_exc_class():
                if display is not None:
                    display.stop()
                raise
        return await report(store, run.id)


def _with_list_prices(config: RunConfig) -> RunConfig:
    """The prices that are known of the servers and models it asks, unless it names its own. They are kept with the run."""
    if config.prices:
        return config
    models: dict[str, tuple[str, str | None]] = {}
    for name, text in config.answers.items():
        policy = PolicyText.read(text)
        models[name] = policy.argument or "", policy.options.get("model", config.model)
    prices, currency = list_prices(models)
    return replace(config, prices=prices, currency=config.currency or currency) if prices else config


async def _load_tasks(config: RunConfig, store: Store) -> Taskset:
    """A run that branches has its parent's task, as the store has it."""
    if config.branch_point is not None:
        return Taskset([(await store.get_rollout(config.branch_point.rollout)).task])
    loading = partial(Taskset.load, config.tasks, trust_tasks=config.trust_tasks, strict=config.strict)
    return await anyio.to_thread.run_sync(loading)


def say_skipped(tasks: Taskset) -> None:
    """One line for all that could not be read; `rollyard check tasks` tells each."""
    if tasks.skipped:
        Log("rollyard.runs").warning(
            "tasks.left_out",
            left_out=len(tasks.skipped),
            of=len(tasks.skipped) + len(tasks),
            first=tasks.skipped[0].reason,
            hint="`rollyard check tasks --lint` names each; --strict makes it an error",
        )


def _say_closed(tasks: Taskset, network: str) -> None:
    """One line if tasks want the public network and do not have it."""
    closed = sum(asks_public(task) for task in tasks) if network == "task" else 0
    if closed:
        Log("rollyard.runs").warning(
            "network.closed",
            tasks=closed,
            of=len(tasks),
            why="they ask for the public network and run without it; --network public gives it to them",
        )


async def _in_this_process(
    stack: AsyncExitStack, config: RunConfig, store: Store, answering: Mapping[str, Policy] | None
) -> dict[str, Any]:
    """The policies and the gate that a local run is given; workers elsewhere open their own."""
    named = answering or await open_policies(stack, config, store)
    gate = await stack.enter_async_context(Gate(next(iter(named.values())), log=store))
    return {"gate": gate, "policies": named if len(named) > 1 else None}
