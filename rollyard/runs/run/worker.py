"""A worker: it claims attempts from the store, runs each through the one lifecycle, and commits what came of it.

There may be one in this process or a hundred on other machines; they meet only in the store. Nothing is kept here that
matters: a worker that is killed loses its leases, its attempts run again elsewhere, and one that was presumed dead and wakes
up commits nothing. A store that is away for a while is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import anyio
import msgspec
from anyio.abc import TaskGroup

from rollyard.core.branch_point import END, BranchPoint
from rollyard.core.errors import ConfigError, LeaseLost, SandboxError, SandboxUnavailable, StoreError
from rollyard.core.events import COMMITTED, POLICY_STOPPED, STARTED, Event
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt, Lease
from rollyard.core.log import Log
from rollyard.core.protocols import Backend, EventSink, Policy, Prefix
from rollyard.core.rollout import Failure, Rollout
from rollyard.core.task import Task
from rollyard.gate import Budget, Gate
from rollyard.runs.report.spending import Spending
from rollyard.runs.rollout.branch_way import choose_way
from rollyard.runs.rollout.kept_snapshots import remove_snapshots
from rollyard.runs.rollout.lifecycle import rollout
from rollyard.runs.rollout.load_parent import load_parent
from rollyard.runs.rollout.load_prefix import load_prefix
from rollyard.runs.rollout.modes import PolicyChoice, choose, find_direct
from rollyard.runs.rollout.plan import RolloutPlan, SessionOptions, check, refusal
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.stages import drop_event
from rollyard.runs.run.admission import MemoryAdmission
from rollyard.runs.run.assignment import Assignment, owner_name
from rollyard.runs.run.config import AUTO
from rollyard.runs.run.lease_keeper import LeaseKeeper
from rollyard.runs.run.loop_load import LoopLoad
from rollyard.runs.run.policy_health import PolicyHealth
from rollyard.runs.run.shipping import NodeImages
from rollyard.runs.run.store_retry import repeat_until_done
from rollyard.runs.run.tree_growth import children_of, find_point
from rollyard.store import Store

Finished = Callable[[Rollout], Awaitable[None]]

FLUSH_S, SHARED_FLUSH_S = 0.1, 2.0  # events of this long become one write; on a shared store each is a transaction
LONGEST_FLUSH_S = 30.0  # and the longer one had to wait, the rarer they become: many workers do not block each other
LOST_CLAIMS = 10  # how often an attempt may take its worker with it before it is given up
_IDLE_S, _LONGEST_IDLE_S = 0.1, 1.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before another try, doubled with every one
_RELEASE_S = 20.0  # for a claim to go back, on a machine where all workers end at once


class WorkerResources(NamedTuple):
    """What a worker works with, opened by its starter and closed after it."""

    store: Store
    gate: Gate
    backend: Backend
    policies: Mapping[str, Policy]  # by the names that attempts have; an attempt without one is the gate's
    provision: Provision
    sink: EventSink = drop_event
    sharers: int = 1  # workers of the run on this machine
    images: NodeImages | None = None  # of a machine that fetches them from the store
    gpus: int | None = None  # of this machine, where attempts that need some go to the machines that have them


class Worker:
    def __init__(self, work: Assignment, means: WorkerResources) -> None:
        self._work, self._means, self._store = work, means, means.store
        self._config = work.config
        self._owner = owner_name()
        self._held: dict[str, tuple[Lease, anyio.CancelScope]] = {}
        self._unwritten: list[tuple[Lease, Event]] = []
        self._telling = anyio.Lock()
        by_memory = work.config.parallel == AUTO
        self._admission = MemoryAdmission.of(means.backend, sharers=means.sharers) if by_memory else None
        self._load = LoopLoad()
        self._keeper = LeaseKeeper(
            self._store,
            work.run_id,
            work.config.lease_s,
            held=lambda: [lease for lease, _ in tuple(self._held.values())],
            turned_at=lambda: self._load.turned_at,
            lose=self._lose,
        )
        self._health = PolicyHealth(0 if work.stays else work.config.policy_failures)
        self._log = Log("rollyard.runs.run.worker")

    @property
    def in_flight(self) -> int:
        return len(self._held)

    async def run(self, slots: float, finished: Finished) -> None:
        """Work, up to `slots` rollouts at a time, until the run owes nothing. Cancelled, it gives its attempts back."""
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._load.watch)
            beside.start_soon(self._keeper.run)
            beside.start_soon(self._tell_often)
            async with anyio.create_task_group() as group:
                await self._pull(anyio.CapacityLimiter(slots), group, finished)
            beside.cancel_scope.cancel()

    # claims

    async def _pull(self, slots: anyio.CapacityLimiter, group: TaskGroup, finished: Finished) -> None:
        idle = _IDLE_S
        while True:
            place = object()
            await slots.acquire_on_behalf_of(place)
            if self._admission is not None:
                await self._admission.wait(lambda: slots.borrowed_tokens - 1)
            await self._load.wait_until_calm(lambda: bool(self._held))
            lease = None if await self._over_budget() else await repeat_until_done(self._claim_or_return)
            if lease is not None:
                group.start_soon(self._attempt, lease, slots, place, finished)
                idle = _IDLE_S
                continue
            slots.release_on_behalf_of(place)
            if await self._is_done():
                return
            await anyio.sleep(idle)
            idle = min(2 * idle, _LONGEST_IDLE_S)

    async def _claim_or_return(self) -> Lease | None:
        """A claim that is under way when the worker is cancelled may be made all the same: it is waited for and given back."""
        claiming = asyncio.ensure_future(self._claim())
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with anyio.move_on_after(_RELEASE_S, shield=True), suppress(StoreError):
                if (lease := await claiming) is not None:
                    await self._store.release(lease)
            raise

    async def _claim(self) -> Lease | None:
        run_id, ttl_s = self._work.run_id, self._config.lease_s
        bounds = {**self._work.concurrency, **dict.fromkeys(self._health.stopped, 0)}
        images, gpus = self._means.images, self._count_free_gpus()
        held = None if images is None else images.held
        lease = await self._store.claim(
            run_id,
            owner=self._owner,
            ttl_s=ttl_s,
            concurrency=bounds,
            images=held,
            gpus=gpus,
            grace_s=self._keeper.measure_grace(),
        )
        if images is not None and lease is not None:
            images.expect(lease.attempt.image)
        return lease

    def _count_free_gpus(self) -> int | None:
        """An attempt that was claimed beyond them would find none when its sandbox opens."""
        if self._means.gpus is None:
            return None
        return max(0, self._means.gpus - sum(lease.attempt.gpus for lease, _ in self._held.values()))

    async def _is_done(self) -> bool:
        if await self._over_budget():
            return not self._held
        if self._work.stays:
            return False
        if stopped := self._health.stopped:
            left = await repeat_until_done(lambda: self._store.attempts(self._work.run_id))
            return not any(a.state in ("owed", "leased") and a.policy not in stopped for a in left) and not self._held
        counts = await repeat_until_done(lambda: self._store.progress(self._work.run_id))
        return not counts.get("owed", 0) and not counts.get("leased", 0)

    async def _over_budget(self) -> bool:
        """What all workers have used, as the store says."""
        config = self._config
        if config.max_cost is None and config.max_tokens is None:
            return False
        spending = Spending(config.prices, max_cost=config.max_cost, max_tokens=config.max_tokens)
        for line in await repeat_until_done(lambda: self._store.spent(self._work.run_id)):
            spending.add(line)
        return spending.over

    def _lose(self, leases: Sequence[Lease]) -> None:
        """End the rollouts of claims that others have taken over: they could not be committed anyway."""
        for lease in leases:
            held = self._held.get(lease.attempt.id)
            if held is not None and held[0] is lease:
                held[1].cancel()

    # one claim

    async def _attempt(self, lease: Lease, slots: anyio.CapacityLimiter, place: object, finished: Finished) -> None:
        """Run it, then commit it or give it back for another try."""
        attempt_id = lease.attempt.id
        rollout_ended: Rollout | None = None
        began = time.monotonic()
        try:
            with anyio.CancelScope() as scope:  # it ends before the commit, so that its events come before the commit
                self._held[attempt_id] = (lease, scope)
                rollout_ended = await self._rollout(lease)
            if rollout_ended is None:
                return
            await self._note_health(lease, rollout_ended, began)
            done = await self._commit(lease, rollout_ended)
            if done is not None:
                await finished(done)
            else:  # it will not be recorded: what it kept is removed with it
                await remove_snapshots((rollout_ended,), self._means.backend)
        except BaseException:  # cancelled too: a lease without a worker goes back at once
            with anyio.move_on_after(_RELEASE_S, shield=True):
                await self._store.release(lease)
            raise
        finally:
            self._held.pop(attempt_id, None)
            slots.release_on_behalf_of(place)

    async def _rollout(self, lease: Lease) -> Rollout:
        attempt, config, means = lease.attempt, self._config, self._means
        task, plan = await self._task(attempt), self._plan(attempt)
        if attempt.tries > config.retries + 1 + LOST_CLAIMS:
            message = f"given up after {attempt.tries - 1} claims: each worker died or lost its lease"
            hint = "does it use up a node's memory?"
            return refusal(task, plan, means.backend.name, SandboxUnavailable(message, hint=hint))
        await self._clear(attempt)
        if (images := means.images) is not None:
            await repeat_until_done(lambda: images.fetch(config.image or task.image))

        async def tell(event: Event) -> None:
            self._unwritten.append((lease, event))
            await means.sink(event)

        try:
            answering = self._choose_policy(attempt)
            point = await repeat_until_done(lambda: find_point(self._store, config, attempt))
            plan, prefix = self._plan(attempt, answering, point), None
            if point is not None:
                plan, prefix = await self._branch(plan, point, task)
            await tell(self._begin_event(attempt, plan.rollout_id))
            return await rollout(
                task,
                plan,
                backend=means.backend,
                gate=means.gate,
                session=SessionOptions(
                    policy=means.policies.get(attempt.policy),
                    budget=Budget(calls=config.max_calls),
                    settings=answering.settings,
                    lease=lease,
                    prefix=prefix,
                ),
                provision=means.provision,
                ending=self._load.ending,
                sink=tell,
            )
        except ConfigError as error:  # this agent and this task do not fit: one cell of the matrix, not the end of it
            return refusal(task, plan, means.backend.name, error)

    async def _branch(self, plan: RolloutPlan, point: BranchPoint, task: Task) -> tuple[RolloutPlan, Prefix]:
        """How it begins: what its agent starts from, and what it is answered until it is where its parent was."""
        config, parent = self._config, await repeat_until_done(lambda: load_parent(self._store, point.rollout, task))
        plan = await choose_way(plan, parent, config.branch_how, self._means.backend, self._means.provision)
        said = config.branch_answer if point == config.branch_point else None
        return plan, await load_prefix(self._store, parent, point, said, resumed=plan.resumed)

    async def _clear(self, attempt: Attempt) -> None:
        """Remove what an earlier holder of the attempt may have left here."""
        if attempt.tries == 1 or not self._means.backend.capabilities.list:
            return
        try:
            await self._means.backend.reap({"rollyard.claim": attempt.id})
        except (SandboxError, OSError) as error:  # what cannot be removed now ends with its own time
            self._log.warning("sandbox.not_reaped", attempt=attempt.id, error=str(error))

    async def _task(self, attempt: Attempt) -> Task:
        known = self._work.tasks.get(attempt.task_id)
        if known is not None:
            return known
        return msgspec.msgpack.decode(
            await repeat_until_done(lambda: self._store.get_blob(attempt.task_digest)), type=Task
        )

    def _plan(
        self, attempt: Attempt, answering: PolicyChoice | None = None, point: BranchPoint | None = None
    ) -> RolloutPlan:
        config = self._config
        labels = {**config.labels, **({"policy": attempt.policy} if attempt.policy else {})}
        plan = RolloutPlan(
            rollout_id=new_id("ro"),
            agent=self._work.agents[attempt.agent],
            options=msgspec.structs.replace(config, seed=attempt.seed, labels=labels),
            attempt=attempt.number,
            run_id=self._work.run_id,
            attempt_id=attempt.id,
            branch=point,
            group_id=_group(attempt),
            verifier=self._work.verifier,
            hooks=self._work.hooks,
        )
        if answering is None:
            return plan
        return msgspec.structs.replace(
            plan, mode=answering.mode, switches=answering.switches, direct=find_direct(config)
        )

    def refuse_hopeless(self) -> None:
        """Refuse a run of which nothing can be done. Where something can, what cannot is kept as refused, cell by cell."""
        first: ConfigError | None = None
        names = product(self._work.tasks, self._work.agents, self._work.policies)
        for task, agent, policy in names:
            attempt = Attempt(
                id="", run_id=self._work.run_id, task_id=task, task_digest="", agent=agent, policy=policy, number=0
            )
            try:
                plan = self._plan(attempt, self._choose_policy(attempt), self._any_point)
                check(plan, self._work.tasks[task], self._means.backend)
            except ConfigError as error:
                first = first or error
            else:
                return
        if first is not None:
            raise first

    @property
    def _any_point(self) -> BranchPoint | None:
        """Of a run in which some rollout branches: all that no such rollout may be is refused at once."""
        return self._config.branch_point or (BranchPoint("any", END) if self._config.tree is not None else None)

    def _choose_policy(self, attempt: Attempt) -> PolicyChoice:
        seed = attempt.seed if attempt.seed is not None else self._config.seed
        return choose(
            msgspec.structs.replace(self._config, base_url=None, seed=seed),  # the policy that it stands for is open
            policy=self._means.policies.get(attempt.policy, self._means.gate.policy),
            agent=self._work.agents[attempt.agent],
        )

    async def _commit(self, lease: Lease, done: Rollout) -> Rollout | None:
        """None when there is nothing to show: the attempt was given back, or another worker has it by now."""
        if done.failure is not None and done.failure.retry:
            if done.failure.boundary == "policy" and lease.attempt.policy in self._health.stopped:
                await self._leave_owed(lease, done, done.failure)
                return None
            if lease.attempt.tries <= self._config.retries:
                await self._return_for_retry(lease, done, done.failure)
                return None
        event = self._event(COMMITTED, done, status=done.status, reward=done.reward)
        events, owes = [*await self._unwritten_events(lease), event], children_of(self._config, lease.attempt, done)
        try:
            await repeat_until_done(
                lambda: self._store.commit_rollout(done, lease=lease, last_events=events, owes=owes)
            )
        except LeaseLost:
            return None
        await self._means.sink(event)
        return done

    async def _note_health(self, lease: Lease, done: Rollout, began: float) -> None:
        """A policy that failed once too often is asked no more; what it owes is left for a resumed run."""
        policy = lease.attempt.policy
        if not self._health.note(policy, done, began=began, now=time.monotonic()):
            return
        fields = {
            "policy": policy,
            "failures": self._config.policy_failures,
            "message": self._health.stopped[policy],
        }
        event = Event(at=time.time(), name=POLICY_STOPPED, run_id=self._work.run_id, fields=fields)
        await repeat_until_done(lambda: self._store.event(event))
        await self._means.sink(event)

    async def _leave_owed(self, lease: Lease, done: Rollout, failure: Failure) -> None:
        event = self._event("attempt.left_owed", done, cause=failure.cause)
        self._unwritten.append((lease, event))
        await self._means.sink(event)
        await self._tell_now()  # before the claim that they belong to is given back
        await repeat_until_done(lambda: self._store.release(lease))

    async def _return_for_retry(self, lease: Lease, done: Rollout, failure: Failure) -> None:
        """For another try, not at once: what failed may be overloaded. A policy's server is asked for nothing more meanwhile."""
        event = self._event("attempt.retried", done, cause=failure.cause)
        self._unwritten.append((lease, event))
        await self._means.sink(event)
        after_s = min(_PAUSE_S * 2 ** (lease.attempt.tries - 1), _LONGEST_PAUSE_S)
        if failure.boundary == "policy":
            pause_s = max(after_s, self._health.pause_s(lease.attempt.policy))
            await repeat_until_done(lambda: self._store.pause(self._work.run_id, lease.attempt.policy, pause_s))
        await self._tell_now()  # before the claim that they belong to is given back
        await repeat_until_done(lambda: self._store.release(lease, after_s=after_s))

    # events

    def _begin_event(self, attempt: Attempt, rollout_id: str) -> Event:
        fields = {"task": attempt.task_id, "attempt": attempt.number, "agent": attempt.agent, "policy": attempt.policy}
        return Event(at=time.time(), name=STARTED, run_id=self._work.run_id, rollout_id=rollout_id, fields=fields)

    def _event(self, name: str, done: Rollout, **fields: Any) -> Event:
        fields = {"task": done.task.id, "attempt": done.attempt, **fields}
        return Event(at=time.time(), name=name, run_id=self._work.run_id, rollout_id=done.id, fields=fields)

    async def _unwritten_events(self, lease: Lease) -> list[Event]:
        """Events of one rollout that are not written yet."""
        async with self._telling:
            own = [event for under, event in self._unwritten if under is lease]
            self._unwritten = [entry for entry in self._unwritten if entry[0] is not lease]
            return own

    async def _tell_often(self) -> None:
        usual = every = SHARED_FLUSH_S if self._store.shared else FLUSH_S
        while True:
            await anyio.sleep(every)
            if self._unwritten:
                began = time.monotonic()
                await self._tell_now()
                every = max(usual, min(LONGEST_FLUSH_S, 10 * (time.monotonic() - began)))

    async def _tell_now(self) -> None:
        async with self._telling:
            events, self._unwritten = self._unwritten, []
            try:
                await self._store.events_under(events)
            except BaseException as error:  # told again with the next ones; only a cancellation goes further
                self._unwritten[:0] = events
                if not isinstance(error, StoreError):
                    raise


def _group(attempt: Attempt) -> str:
    """The group that an attempt's id names (`GROUP:NUMBER`), or all attempts at the same cell of the run."""
    group, colon, _ = attempt.id.rpartition(":")
    return group if colon else f"{attempt.run_id}/{attempt.task_id}/{attempt.agent}/{attempt.policy}"
