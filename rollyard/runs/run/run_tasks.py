"""`await ry.run(tasks, ...)`: a whole run in one call, which opens the store, the gate and the policies itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rollyard.core.agent import DEFAULT_AGENT, Agent
from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.home import default_store
from rollyard.core.protocols import Backend, Policy
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.policy import PolicyText
from rollyard.runs.display.loggers import with_loggers
from rollyard.runs.display.progress import Display, display
from rollyard.runs.rollout.open_policy import open_policy, refuse_queue, silent_policy
from rollyard.runs.run.config import POLICY, RunConfig, anchor
from rollyard.runs.run.drive import say_skipped
from rollyard.runs.run.policy_health import check_servers
from rollyard.runs.run.run import Run, agents_of
from rollyard.store import Store
from rollyard.store.data_frames import RolloutList
from rollyard.tasks.taskset import Taskset
from rollyard.tasks.verifiers.python import Checks

Tasks = str | Path | Task | Iterable[Task | Mapping[str, Any] | str]
Answers = str | Policy


async def run(
    tasks: Tasks,
    *,
    agent: str | Agent | Sequence[str | Agent] = DEFAULT_AGENT,
    policy: Answers | Mapping[str, Answers] | None = None,
    store: str | Path | Store | None = None,
    sandbox: str | Backend = "local",
    verifier: Checks | None = None,
    progress: str | Display = "none",
    log_to: str | Sequence[str] = (),
    **fields: Any,
) -> RolloutList:
    """Run agents on tasks and give the rollouts, in the order they ended.

        rollouts = await ry.run("tasks", agent="claude-code", base_url=url, model="m", attempts=4)

    `tasks` is a path that `Taskset.load` takes, a task, or several. Who answers: `policy` (an object, `"scripted:FILE"`, or
    several by name), or `base_url` with `model`. Everything is kept in `store`: a path, an address, one that is open, or
    `runs.db` (`ROLLYARD_STORE`). `progress` is `rich`, `plain` or `auto` to be told while it goes on, `log_to` `wandb`,
    `mlflow` or `tensorboard` (`KIND:WHERE`) for a dashboard. All other fields are
    `RunConfig`'s: attempts, parallel, name, limit, max_calls, ..."""
    named, agents = _by_name(policy), agents_of([agent] if isinstance(agent, str | Agent) else agent)
    config = _config(fields, tasks, agents, named)
    shown = display(progress) if isinstance(progress, str) else progress
    shown = with_loggers(shown, [log_to] if isinstance(log_to, str) else log_to)
    async with AsyncExitStack() as stack:
        kept = store if isinstance(store, Store) else None
        if kept is None:
            kept = await stack.enter_async_context(Store.open(str(store or default_store())))
        chosen = await anyio.to_thread.run_sync(partial(_load, tasks, config))
        opened = await _open(stack, config, named, kept)
        await check_servers(opened, config.model)
        gate = await stack.enter_async_context(Gate(next(iter(opened.values())), log=kept))
        stack.enter_context(shown)
        running = Run(
            chosen, gate=gate, store=kept, config=config, agent=list(agents.values()), sandbox=sandbox, verifier=verifier,
            policies=opened if len(opened) > 1 else None, sink=shown.event,
        )  # fmt: skip
        done = RolloutList()
        async with running:
            shown.begin(running.id, running.owed, running.done)
            async for rollout in running:
                shown.rollout(rollout)
                done.append(rollout)
        return done


def _by_name(policy: Answers | Mapping[str, Answers] | None) -> Mapping[str, Answers]:
    """Files that a policy's text names are found from here, wherever the run goes on."""
    given = {} if policy is None else policy if isinstance(policy, Mapping) else {POLICY: policy}
    return {name: anchor(one, Path.cwd()) if isinstance(one, str) else one for name, one in given.items()}


def _config(
    fields: Mapping[str, Any], tasks: Tasks, agents: Mapping[str, Agent], named: Mapping[str, Answers]
) -> RunConfig:
    taken = {"tasks", "agents", "policies", "sandbox"}
    for name in fields:
        if name in taken or name not in RunConfig.__struct_fields__:
            raise UnknownName("field of a run", name, sorted(set(RunConfig.__struct_fields__) - taken))
    config = RunConfig(
        tasks=str(Path(tasks).absolute()) if isinstance(tasks, str | Path) else "",
        agents=tuple(agents),
        policies={name: text for name, text in named.items() if isinstance(text, str)},
    )
    config = msgspec.structs.replace(config, **fields)
    if named and config.base_url is not None:
        raise ConfigError("policy and base_url both say who answers", hint="give one of them")
    callers = [agent.name for agent in agents.values() if agent.calls_model]
    if callers and not named and config.base_url is None:
        raise ConfigError(
            f"no policy answers the model calls of {', '.join(callers)}",
            hint="policy=..., or base_url=... with model=...",
        )
    return config


def _load(tasks: Tasks, config: RunConfig) -> Iterable[Task | Mapping[str, Any] | str]:
    if isinstance(tasks, Task):
        return [tasks]
    if not isinstance(tasks, str | Path):
        return tasks
    loaded = Taskset.load(tasks, trust_tasks=config.trust_tasks, strict=config.strict)
    say_skipped(loaded)
    return loaded


async def _open(
    stack: AsyncExitStack, config: RunConfig, named: Mapping[str, Answers], store: Store
) -> Mapping[str, Policy]:
    """Policies that were given stay the caller's; those named by text, or by `base_url`, are closed with the run."""
    opened: dict[str, Policy] = {}
    for name, answers in (named or config.answers).items():
        if isinstance(answers, str):
            refuse_queue(PolicyText.read(answers))
            policy = await open_policy(answers, store=store, model=config.model, key_env=config.key_env)
            stack.push_async_callback(policy.aclose)
            opened[name] = policy
        else:
            opened[name] = answers
    return opened or {POLICY: silent_policy()}
