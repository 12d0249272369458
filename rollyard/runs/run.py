"""Many rollouts under one config: `Run`.

The store says what is owed. Workers claim attempts under leases with fencing numbers, run each through the one lifecycle, and
commit rollout, calls, events and verdict. A run that was killed is entered again by its id and does only what is missing; a
worker that lost its lease commits nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from rollyard import agents as agent_registry
from rollyard.core.agent import Agent
from rollyard.core.errors import ConfigError, LeaseLost
from rollyard.core.events import Event
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt, Lease
from rollyard.core.protocols import Backend, EventSink, Policy, Verifier
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.gate import Budget, Gate
from rollyard.runs.config import RunConfig
from rollyard.runs.modes import Answering, choose
from rollyard.runs.plan import Hooks, Plan
from rollyard.runs.provision import Provision
from rollyard.runs.rollout import rollout
from rollyard.runs.spending import Spending
from rollyard.runs.stages import nowhere
from rollyard.sandbox import backend as open_backend
from rollyard.store import Store
from rollyard.store.values import row_of

LEASE_S = 60.0
_IDLE_S = 0.2


def owner_name() -> str:
    """Who holds a lease. A later run on the same machine can see that this process is gone."""
    started = _started(os.getpid()) or "0"
    return f"{socket.gethostname()}/{os.getpid()}/{started}"


def owner_is_dead(owner: str) -> bool:
    """True only for an owner on this machine whose process no longer exists."""
    host, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    return host == socket.gethostname() and pid.isdigit() and _started(int(pid)) != started


def _started(pid: int) -> str | None:
    """The kernel's start time of a process: pids come back, the pair does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return None


class Run:
    """`async with Run(...) as run: async for rollout in run: ...`

    Rollouts come as they end, in any order. Leaving the block early cancels what is in flight and leaves nothing behind;
    the attempts stay owed."""

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        gate: Gate,
        store: Store,
        config: RunConfig | None = None,
        agent: str | Agent | Sequence[str | Agent] | None = None,
        policies: Mapping[str, Policy] | None = None,
        sandbox: str | Backend | None = None,
        verifier: Verifier | None = None,
        hooks: Hooks | None = None,
        resume: str | None = None,
        sink: EventSink = nowhere,
        provision: Provision | None = None,
        **fields: Any,
    ) -> None:
        base = config or RunConfig()
        self.config = msgspec.structs.replace(base, **fields)
        named = [agent] if isinstance(agent, str | Agent) else list(agent or self.config.agents)
        self._agents = {a.name: a for a in (agent_registry.get(x) if isinstance(x, str) else x for x in named)}
        self._tasks = {task.id: task for task in chosen(tasks, self.config)}
        self._policies = dict(policies or {})
        self._gate, self._store = gate, store
        self._sandbox = sandbox if sandbox is not None else self.config.sandbox
        self._verifier, self._hooks, self._sink = verifier, hooks or Hooks(), sink
        self._provision = provision or Provision.of(self._sandbox)
        self._resume = resume
        self._owner = owner_name()
        self._known("concurrency")
        self._known("prices")
        self._limiters = {name: anyio.CapacityLimiter(n) for name, n in self.config.concurrency.items()}
        self.spending = Spending(self.config.prices, max_cost=self.config.max_cost, max_tokens=self.config.max_tokens)
        self.id = ""
        self.owed = 0
        self.done = 0

    async def __aenter__(self) -> Self:
        if not self._tasks:
            raise ConfigError("no task matches", hint="see filter and limit, and what the taskset holds")
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
        self._group.cancel_scope.cancel()
        return await self._stack.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        async for found in self._finished:
            yield found

    async def cancel(self) -> None:
        """End the run: rollouts in flight are cancelled and their attempts stay owed."""
        self._group.cancel_scope.cancel()

    # set-up

    def _known(self, field: str) -> None:
        """A setting by policy name is for policies that are there."""
        for name in getattr(self.config, field):
            if self._policies and name not in self._policies:
                raise ConfigError(f"{field} names the policy {name!r}, which the run does not have")

    async def _begin(self) -> None:
        self.backend = (
            await self._stack.enter_async_context(open_backend(self._sandbox))
            if isinstance(self._sandbox, str)
            else self._sandbox
        )
        if self._resume is None:
            self.id = await self._store.create_run(msgspec.to_builtins(self.config), id=new_id("run"))
            await self._store.add_attempts(self.id, self._attempts())
        else:
            self.id = self._resume
            await self._recover()
            for line in await self._store.lines(self.id):
                self.spending.add(line)
        counts = await self._store.progress(self.id)
        self.done = counts.get("done", 0) + counts.get("failed", 0)
        self.owed = counts.get("owed", 0) + counts.get("leased", 0)
        send, self._finished = anyio.create_memory_object_stream[Rollout](self.config.parallel)
        await self._stack.enter_async_context(self._finished)
        self._group: TaskGroup = await self._stack.enter_async_context(anyio.create_task_group())
        self._group.start_soon(self._work_all, send)

    def _attempts(self) -> list[Attempt]:
        names = list(self._policies) or [""]
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
            )
            for number in range(self.config.attempts)
            for task in self._tasks.values()
            for agent in self._agents
            for policy in names
        ]

    async def _recover(self) -> None:
        """What a killed runner left: its leases are given back, its sandboxes removed, its open sessions closed."""
        for lease in await self._store.leases(self.id):
            if owner_is_dead(lease.owner):
                await self._store.expire(lease)
        if self.backend.capabilities.list:
            await self.backend.reap({"rollyard.run": self.id})

    # the workers

    async def _work_all(self, send: MemoryObjectSendStream[Rollout]) -> None:
        async with send, anyio.create_task_group() as group:
            for _ in range(self.config.parallel):
                group.start_soon(self._work, send.clone())

    async def _work(self, send: MemoryObjectSendStream[Rollout]) -> None:
        async with send:
            while not self.spending.over:
                lease = await self._store.claim(self.id, owner=self._owner, ttl_s=LEASE_S)
                if lease is None:
                    counts = await self._store.progress(self.id)
                    if not counts.get("owed", 0) and not counts.get("leased", 0):
                        return
                    await anyio.sleep(_IDLE_S)
                    continue
                finished = await self._attempt(lease)
                if finished is not None:
                    await send.send(finished)

    async def _attempt(self, lease: Lease) -> Rollout | None:
        """One claim: run it, then commit it, or give it back for another try. None when there is nothing to show."""
        limiter = self._limiters.get(lease.attempt.policy)
        finished: Rollout | None = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep, lease, group.cancel_scope)
                if limiter is not None:
                    await limiter.acquire()
                try:
                    finished = await self._rollout(lease)
                finally:
                    if limiter is not None:
                        limiter.release()
                group.cancel_scope.cancel()
        except BaseException:  # cancelled too: a lease without a worker goes back at once
            with anyio.move_on_after(5, shield=True):
                await self._store.release(lease)
            raise
        return await self._commit(lease, finished)

    async def _keep(self, lease: Lease, scope: anyio.CancelScope) -> None:
        """Heartbeats; a lost lease stops the rollout, since it could not be committed anyway."""
        while True:
            await anyio.sleep(LEASE_S / 3)
            try:
                await self._store.heartbeat(lease, ttl_s=LEASE_S)
            except LeaseLost:
                scope.cancel()
                return

    async def _commit(self, lease: Lease, finished: Rollout | None) -> Rollout | None:
        if finished is None:
            return None
        failure = finished.failure
        if failure is not None and failure.retry and lease.attempt.tries <= self.config.retries:
            await self._sink(
                Event(
                    at=finished.started_at + finished.wall_s,
                    name="attempt.retried",
                    run_id=self.id,
                    rollout_id=finished.id,
                    fields={"cause": failure.cause},
                )
            )
            await self._store.release(lease)
            return None
        try:
            await self._store.commit_rollout(finished, lease=lease)
        except LeaseLost:
            return None
        self.spending.add(row_of(finished))
        return finished

    async def _rollout(self, lease: Lease) -> Rollout:
        attempt, config = lease.attempt, self.config
        agent = self._agents[attempt.agent]
        answering = self._answering(attempt.policy, agent)
        plan = Plan(
            rollout_id=new_id("ro"),
            agent=agent,
            mode=answering.mode,
            model=config.model or "policy",
            attempt=attempt.number,
            run_id=self.id,
            group_id=f"{self.id}/{attempt.task_id}/{attempt.agent}/{attempt.policy}",
            seed=attempt.seed,
            labels={**config.labels, **({"policy": attempt.policy} if attempt.policy else {})},
            limits=config.limits,
            system_prompt=config.system_prompt,
            disabled_tools=config.disabled_tools,
            **answering.left_to_agent,
            allow_network=config.allow_network,
            allow_unsafe=config.allow_unsafe,
            min_isolation=config.min_isolation,
            verifier=self._verifier,
            hooks=self._hooks,
            gate_url=config.gate_url,
            sandbox_options=config.sandbox_options,
        )

        async def tell(event: Event) -> None:
            await self._store.event(event)
            await self._sink(event)

        return await rollout(
            self._tasks[attempt.task_id],
            plan,
            backend=self.backend,
            gate=self._gate,
            session_options={
                "policy": self._policies.get(attempt.policy),
                "budget": Budget(calls=config.max_calls),
                "settings": answering.settings,
            },
            provision=self._provision,
            sink=tell,
        )

    def _answering(self, name: str, agent: Agent) -> Answering:
        config = self.config
        return choose(
            config.mode,
            policy=self._policies.get(name, self._gate.policy),
            switches=agent.switches,
            disable_thinking=config.disable_thinking,
            max_tokens_cap=config.max_tokens_cap,
            top_logprobs=config.top_logprobs,
        )


def chosen(tasks: Iterable[Task], config: RunConfig) -> list[Task]:
    """The tasks that `filter` and `limit` leave, in the taskset's order."""
    kept = [t for t in tasks if not config.filter or any(fnmatchcase(t.id, pattern) for pattern in config.filter)]
    return kept[: config.limit] if config.limit is not None else kept
