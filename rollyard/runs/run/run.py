"""Many rollouts under one config: `Run`.

The store says what is owed. An executor's workers claim attempts under leases with fencing numbers, run each through the one
lifecycle, and commit rollout, calls, events and verdict. A run that was killed is entered again by its id and does only what
is missing; a worker that lost its lease commits nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import PurePath
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from rollyard import agents as agent_registry
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError, Error
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt
from rollyard.core.protocols import Backend, EventSink, Policy
from rollyard.core.rollout import Rollout
from rollyard.core.sequences import as_tuple
from rollyard.core.task import Task
from rollyard.gate import Gate
from rollyard.runs.display.notebook import EndedCounts
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import drop_event
from rollyard.runs.run.assignment import Assignment, needed_image, owner_is_dead, select_tasks
from rollyard.runs.run.config import RunConfig
from rollyard.runs.run.executor import Executor, Local, RunResources
from rollyard.store import Store
from rollyard.tasks.taskset import Taskset
from rollyard.tasks.verifiers.python import Checks
from rollyard.tasks.verifiers.weighted import as_judge


class Run:
    """`async with Run(...) as run: async for rollout in run: ...`

    Tasks are what `Taskset` takes: tasks, mappings and strings. Rollouts come as they end, in any order. Leaving the block
    early cancels what is in flight and leaves nothing behind; the attempts stay owed. `executor` says where rollouts are done:
    in this process with `gate`, or on a cluster, where each worker opens a gate and the config's policies beside its
    sandboxes. `resume` finishes a run that is there; `id` begins or finishes one, for who has to know it before."""

    def __init__(
        self,
        tasks: Iterable[Task | Mapping[str, Any] | str],
        *,
        gate: Gate | None = None,
        store: Store,
        config: RunConfig | None = None,
        agent: str | Agent | Sequence[str | Agent] | None = None,
        policies: Mapping[str, Policy] | None = None,
        sandbox: str | Backend | None = None,
        verifier: Checks | None = None,
        hooks: Hooks | None = None,
        resume: str | None = None,
        id: str | None = None,
        sink: EventSink = drop_event,
        provision: Provision | None = None,
        executor: Executor | None = None,
        **fields: Any,
    ) -> None:
        if gate is not None and fields.get("base_url") is not None:
            raise ConfigError("gate and base_url both say who answers", hint="give one of them")
        base = config or RunConfig()
        self.config = msgspec.structs.replace(base, **fields)
        self._work = Assignment(
            run_id=resume or id or new_id("run"),
            config=self.config,
            tasks={task.id: task for task in select_tasks(_taskset(tasks), self.config)},
            agents=agents_of([agent] if isinstance(agent, str | Agent) else agent or self.config.agents),
            policies=_policy_names(policies, self.config, gate),
            verifier=as_judge(verifier),
            hooks=hooks or Hooks(),
        )
        if policies:
            _check_known(self.config, policies)
        place = sandbox if sandbox is not None else self.config.sandbox
        self._given = RunResources(store, place, gate, dict(policies or {}), provision, sink)
        self._executor: Executor = executor or Local()
        self._store, self._resumed, self._named = store, resume is not None, id is not None
        self.id = self._work.run_id
        self.owed = 0
        self.done = 0
        self._ended = EndedCounts()

    async def __aenter__(self) -> Self:
        if not self._work.tasks:
            raise ConfigError("no task matches", hint="see filter and limit, and what the taskset holds")
        await self._executor.check(self._work, self._given)
        self._stack = AsyncExitStack()
        await self._stack.__aenter__()
        try:
            await self._begin()
        except BaseException:  # cancelled too: what was entered is left
            with anyio.CancelScope(shield=True):
                await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if (only := _only_error(group)) is None:
                raise
            raise only from None

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        async for found in self._crew:
            self._ended.add(found)
            yield found

    def _repr_html_(self) -> str:
        """How a notebook shows the run: its progress."""
        return self._ended.draw(self.id, self.owed, self.done)

    async def cancel(self) -> None:
        """End the run: rollouts in flight are cancelled and their attempts stay owed."""
        await self._crew.cancel()

    async def _begin(self) -> None:
        opening = self._executor.open(self._work, self._given, self._record)
        self._crew = await self._stack.enter_async_context(opening)

    async def _record(self) -> None:
        if self._resumed or (self._named and await self._store.has_run(self.id)):
            await self._recover()
        else:
            await self._store.create_run(msgspec.to_builtins(self.config), id=self.id)
        if not self._resumed:
            # The process that began a named run may have died before all were kept; those that were stay
            await self._store.add_attempts(self.id, self._attempts())
        counts = await self._store.progress(self.id)
        self.done = counts.get("done", 0) + counts.get("failed", 0)
        self.owed = counts.get("owed", 0) + counts.get("leased", 0)

    def _attempts(self) -> list[Attempt]:
        return [
            Attempt(
                id=new_id("att"),
                run_id=self.id,
                task_id=task.id,
                task_digest=task.digest,
                agent=agent,
                policy=policy,
                number=number,
                seed=None if self.config.seed is None else self.config.seed + number,
                image=needed_image(task, self.config),
                gpus=task.resources.gpus or 0,
            )
            for number in range(self.config.attempts)
            for task in self._work.tasks.values()
            for agent in self._work.agents
            for policy in self._work.policies
        ]

    async def _recover(self) -> None:
        """Leases of workers that are known to be dead are given back at once; the others run out by themselves."""
        for lease in await self._store.leases(self.id):
            if owner_is_dead(lease.owner):
                await self._store.expire(lease)


def agents_of(named: Iterable[str | Agent]) -> dict[str, Agent]:
    """Agents by name, from names or as they are."""
    found = (agent_registry.get(one) if isinstance(one, str) else one for one in named)
    return {one.name: one for one in found}


def _taskset(tasks: Iterable[Task | Mapping[str, Any] | str]) -> Taskset:
    if isinstance(tasks, str | PurePath):
        raise ConfigError(
            f"tasks: a list of tasks, not the string {str(tasks)!r}",
            hint=f"Taskset.load({str(tasks)!r}) reads a folder or file",
        )
    return tasks if isinstance(tasks, Taskset) else Taskset(as_tuple(tasks, "tasks"))


def _check_known(config: RunConfig, policies: Mapping[str, Policy]) -> None:
    """A setting by policy name is for policies that are there."""
    for field in ("concurrency", "prices"):
        for name in getattr(config, field):
            if name not in policies:
                raise ConfigError(f"{field} names the policy {name!r}, which the run does not have")


def _only_error(group: BaseExceptionGroup[BaseException]) -> Error | None:
    """The one error of ours behind a group that task groups made of it."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found if isinstance(found, Error) else None


def _policy_names(policies: Mapping[str, Policy] | None, config: RunConfig, gate: Gate | None) -> tuple[str, ...]:
    """The names that attempts have. A run whose only policy is the gate's has one without a name."""
    if policies:
        return tuple(policies)
    return tuple(config.answers) if gate is None and len(config.answers) > 1 else ("",)
