"""From a `RunConfig` to a finished run: opens the store, the policies and the gate, shows progress, and reports.

This is what `rollyard run` does. A run's config is kept in the store, so `resume` needs only the run's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

import anyio

from rollyard import policy as policies
from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Backend, Policy
from rollyard.gate import Gate
from rollyard.runs.config import RunConfig, convert
from rollyard.runs.progress import Display
from rollyard.runs.report import Report, report
from rollyard.runs.run import Run
from rollyard.runs.stages import nowhere
from rollyard.store import Store
from rollyard.tasks.taskset import Taskset

_SERVERS = ("upstream:", "passthrough:", "tokens:")  # policies that talk to a model server


async def drive(config: RunConfig | None, *, store: str, display: Display, resume: str | None = None) -> Report:
    """Run `config` (or what is left of the run `resume`) to its end and report. Ctrl-C cancels cleanly; attempts stay owed."""
    async with Store.open(store) as kept:
        if resume is not None:
            config = convert((await kept.get_run(resume)).config, f"run {resume}")
        if config is None or not config.policies:
            raise ConfigError(
                "nobody answers the model calls", hint="--policy scripted:FILE, or --base-url URL --model M"
            )
        with display:
            return await carry_out(config, store=kept, display=display, resume=resume)


async def carry_out(
    config: RunConfig,
    *,
    store: Store,
    display: Display | None = None,
    resume: str | None = None,
    answering: Mapping[str, Policy] | None = None,
    sandbox: str | Backend | None = None,
) -> Report:
    """The whole matrix of a config through one queue. `answering` are policies of the caller's, by name."""
    async with AsyncExitStack() as stack:
        named = answering or _policies(stack, config)
        loading = partial(Taskset.load, config.tasks, allow_network=config.allow_network)
        tasks = await anyio.to_thread.run_sync(loading)
        gate = await stack.enter_async_context(Gate(next(iter(named.values())), log=store))
        async with Run(
            tasks,
            gate=gate,
            store=store,
            config=config,
            policies=named if len(named) > 1 else None,
            resume=resume,
            sink=display.event if display is not None else nowhere,
            sandbox=sandbox,
        ) as run:
            if display is not None:
                display.begin(run.id, run.owed, run.done)
            async for rollout in run:
                if display is not None:
                    display.rollout(rollout)
        return await report(store, run.id)


def _policies(stack: AsyncExitStack, config: RunConfig) -> Mapping[str, Policy]:
    """Each by its name, closed with the stack."""
    if not config.policies:
        raise ConfigError("nobody answers the model calls", hint='[policies] NAME = "upstream:URL"')
    made: dict[str, Policy] = {}
    for name, text in config.policies.items():
        settings = {"model": config.model, "key_env": config.key_env} if text.startswith(_SERVERS) else {}
        policy = made[name] = policies.parse(text, **settings)
        stack.push_async_callback(policy.aclose)
    return made
