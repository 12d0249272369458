"""Where a run's rollouts are done: an `Executor` starts workers and hands back what they finish.

`local` is a worker in this process and the default, or with `workers` as many processes of this machine
(`process_executor.py`); `ray` (`ray_executor.py`, imported only when chosen) puts workers on the nodes of a cluster. All run the
same `Worker` against the same store, so a run may be begun by one and finished by another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from rollyard.core.errors import ConfigError, UnknownName
from rollyard.core.protocols import Backend, EventSink, Policy
from rollyard.core.rollout import Rollout
from rollyard.gate import Gate
from rollyard.runs.rollout.open_backend import open_named
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import drop_event
from rollyard.runs.run.assignment import Assignment
from rollyard.runs.run.policy_health import check_servers
from rollyard.runs.run.worker import Worker, WorkerResources
from rollyard.store import Store

EXECUTORS = ("local", "ray")
UNREAD = 256  # finished rollouts that wait for the iterating caller
Record = Callable[[], Awaitable[None]]  # puts what is owed into the store


class RunResources(NamedTuple):
    """What the caller of a run brought. An executor on other machines uses the store and the sink alone."""

    store: Store
    sandbox: str | Backend
    gate: Gate | None = None
    policies: Mapping[str, Policy] = {}
    provision: Provision | None = None
    sink: EventSink = drop_event


class Workers(Protocol):
    """Workers under way. Iterating gives rollouts as they are committed and ends when the run owes nothing."""

    def __aiter__(self) -> AsyncIterator[Rollout]: ...
    async def cancel(self) -> None:
        """End what is in flight; its attempts stay owed."""
        ...


class Executor(Protocol):
    """`open` starts; leaving its block early cancels what is in flight and leaves nothing behind. It calls `record` once all
    that can be refused at once has been, before the first worker looks for work."""

    name: str

    async def check(self, work: Assignment, given: RunResources) -> None:
        """Refuse what this executor cannot do, by name, before anything is written."""
        ...

    def open(self, work: Assignment, given: RunResources, record: Record) -> AbstractAsyncContextManager[Workers]: ...


def executor(name: str, **options: Any) -> Executor:
    """By name. Options are the executor's own: `local` has `workers`, processes of this machine instead of this one."""
    if name == "ray":
        from rollyard.runs.run.ray_executor import Ray

        return Ray(**options)
    if name != "local":
        raise UnknownName("executor", name, EXECUTORS)
    workers = options.pop("workers", None)
    if options:
        raise ConfigError(f"the local executor has no option {next(iter(options))!r}")
    if workers is None:
        return Local()
    from rollyard.runs.run.process_executor import ProcessExecutor

    return ProcessExecutor(workers)


class Local:
    """A worker in this process, with the caller's own gate and policies."""

    name = "local"

    async def check(self, work: Assignment, given: RunResources) -> None:
        if given.gate is None:
            raise ConfigError("a run in this process needs a gate", hint="Run(..., gate=Gate(policy, log=store))")
        if any(agent.dialect is not None for agent in work.agents.values()):
            await check_servers(given.policies or {"": given.gate.policy}, work.config.model)

    @asynccontextmanager
    async def open(self, work: Assignment, given: RunResources, record: Record) -> AsyncGenerator[Workers]:
        assert given.gate is not None
        async with AsyncExitStack() as stack:
            backend = given.sandbox
            if isinstance(backend, str):
                backend = await stack.enter_async_context(open_named(backend, work.config))
            provision = given.provision or Provision.of(backend)
            worker = Worker(
                work, WorkerResources(given.store, given.gate, backend, given.policies, provision, given.sink)
            )
            worker.refuse_hopeless()
            await record()
            slots = work.config.slots()
            send, finished = anyio.create_memory_object_stream[Rollout](min(slots, UNREAD))
            await stack.enter_async_context(finished)
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(_work, worker, slots, send)
            try:
                yield _LocalWorkers(finished, group.cancel_scope)
            finally:
                group.cancel_scope.cancel()


async def _work(worker: Worker, slots: float, send: MemoryObjectSendStream[Rollout]) -> None:
    async with send:
        await worker.run(slots, send.send)


class _LocalWorkers:
    def __init__(self, finished: AsyncIterator[Rollout], scope: anyio.CancelScope) -> None:
        self._finished, self._scope = finished, scope

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        async for rollout in self._finished:
            yield rollout

    async def cancel(self) -> None:
        self._scope.cancel()
