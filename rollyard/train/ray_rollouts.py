"""`RayRollouts`: rollouts on a Ray cluster for a trainer that lives there too.

    rollouts = ry.train.RayRollouts(store="postgresql://...", policy="tokens:URL#renderer=...", agent="pi", max_staleness=2)
    rollouts.submit(task, size=8)
    for scored in rollouts.take(max=32):  ...          # rows as they finish, in any order
    rollouts.update(version=step)                      # what was begun too long ago is given up, and said so

The trainer holds a handle; an actor keeps the books; workers on every node pull attempts from the store. **Every attempt that
was submitted comes out exactly once**: with rows and a reward, or with the reason why it has none (failed, stale, cancelled). So
a group that stays partial is reported, never dropped. Not a trainer: it computes no advantage and touches no weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec

from rollyard.core.agent import DEFAULT_AGENT
from rollyard.core.errors import ConfigError, Error
from rollyard.core.ids import new_id
from rollyard.core.lease import Attempt
from rollyard.core.protocols import Verifier
from rollyard.core.rollout import Rollout
from rollyard.core.task import Task
from rollyard.runs.rollout.plan import Hooks
from rollyard.runs.run.assignment import Assignment, needed_image
from rollyard.runs.run.config import POLICY, RunConfig
from rollyard.runs.run.executor import RunResources, Workers
from rollyard.runs.run.ray_executor import NAMESPACE, Ray, connect_ray
from rollyard.runs.run.run import agents_of
from rollyard.store import Store
from rollyard.tasks.verifiers.python import Checks
from rollyard.tasks.verifiers.weighted import as_judge
from rollyard.trajectory.samples import Sample, samples

Why = Literal["failed", "stale", "cancelled"]
_ANSWER_S = 120.0


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a group, as it ended. `rows` is empty and `why` says why where nothing can be trained on."""

    group_id: str
    task_id: str
    number: int
    size: int  # of the group
    left: int  # attempts of the group that are still to come
    version: int  # of the policy when the group was submitted
    rows: tuple[Sample, ...] = ()
    reward: float | None = None
    rollout_id: str | None = None
    why: Why | None = None
    message: str = ""


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where on Ray: the cluster, how many workers a node gets, and the actor's name."""

    address: str = "auto"
    per_node: int = 1
    name: str | None = None


class StartResult(msgspec.Struct, frozen=True, kw_only=True):
    """How an actor began: with a run, or with what was in the way. An error's class may not survive the way out of an actor."""

    run_id: str = ""
    error: str | None = None


class TakeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `take` gave; `error` says why nothing more will ever come."""

    scored: tuple[Scored, ...] = ()
    error: str | None = None


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor is made with."""

    store: str
    config: RunConfig
    ray: RayOptions
    verifier: Verifier | None = None
    hooks: Hooks = Hooks()


class _Group(msgspec.Struct, kw_only=True):
    id: str
    task_id: str
    first: int  # the number that its first attempt has in the run
    size: int
    version: int
    to_come: set[int]  # places in the group

    def attempt_id(self, place: int) -> str:
        return f"{self.id}:{place}"


class Rollouts:
    """The actor's class: it keeps which attempt belongs to which group, and nothing that the store does not have."""

    def __init__(self, order: ActorSpec) -> None:
        self._order = order
        self._groups: dict[str, _Group] = {}
        self._ready: deque[Scored] = deque()
        self._more = asyncio.Condition()
        self._counts: dict[str, int] = {}  # attempts at each task so far
        self._version = 0
        self._broken: str | None = None

    async def start(self) -> StartResult:
        ready: asyncio.Future[StartResult] = asyncio.get_running_loop().create_future()
        self._life = asyncio.get_running_loop().create_task(self._run_workers(ready))
        return await ready

    async def _run_workers(self, ready: asyncio.Future[StartResult]) -> None:
        """From the first worker to the last, in one task: the task that enters a crew must leave it."""
        try:
            async with AsyncExitStack() as stack:
                crew = await self._open(stack)
                ready.set_result(StartResult(run_id=self._work.run_id))
                async for rollout in crew:
                    await self._end_rollout(rollout)
        except Exception as error:  # noqa: BLE001 - whatever ends the workers is raised for the trainer, which waits
            if not ready.done():
                ready.set_result(StartResult(error=f"no rollouts: {error}"))
            async with self._more:
                self._broken = f"the rollouts ended: {error}"
                self._more.notify_all()

    async def _open(self, stack: AsyncExitStack) -> Workers:
        order = self._order
        self._store = await stack.enter_async_context(Store.open(order.store))
        self._work = Assignment(
            run_id=new_id("run"),
            config=order.config,
            tasks={},
            agents=agents_of(order.config.agents),
            verifier=order.verifier,
            hooks=order.hooks,
            stays=True,
        )
        executor = Ray(order.ray.address, per_node=order.ray.per_node, detached=False)
        given = RunResources(self._store, order.config.sandbox)
        await executor.check(self._work, given)
        return await stack.enter_async_context(executor.open(self._work, given, self._record))

    async def _record(self) -> None:
        await self._store.create_run(msgspec.to_builtins(self._order.config), id=self._work.run_id)

    async def submit(self, task: Task, size: int, seed: int | None) -> str:
        first = self._counts.get(task.id, 0)
        self._counts[task.id] = first + size
        to_come = set(range(size))
        group = _Group(
            id=new_id("grp"), task_id=task.id, first=first, size=size, version=self._version, to_come=to_come
        )
        digest = await self._store.put_blob(msgspec.msgpack.encode(task))
        attempts = [
            Attempt(
                id=group.attempt_id(place),
                run_id=self._work.run_id,
                task_id=task.id,
                task_digest=digest,
                agent=next(iter(self._work.agents)),
                number=first + place,
                seed=None if seed is None else seed + place,
                image=needed_image(task, self._order.config),
                gpus=task.resources.gpus or 0,
            )
            for place in range(size)
        ]
        self._groups[group.id] = group
        await self._store.add_attempts(self._work.run_id, attempts)
        return group.id

    async def take(self, most: int, wait_s: float) -> TakeResult:
        """Up to `most`, as soon as there is one; none when none came in time."""
        async with self._more:
            try:
                async with asyncio.timeout(wait_s):
                    await self._more.wait_for(lambda: self._ready or self._broken)
            except TimeoutError:
                return TakeResult()
            if not self._ready and self._broken is not None:
                return TakeResult(error=self._broken)
            return TakeResult(scored=tuple(self._ready.popleft() for _ in range(min(most, len(self._ready)))))

    async def update(self, version: int) -> list[str]:
        """The policy's version from now on; gives the groups that were given up because they are too old by it."""
        self._version = max(self._version, version)
        limit = self._order.config.max_staleness
        if limit is None or self._order.config.when_stale == "mask":
            return []
        old = [group.id for group in self._groups.values() if self._version - group.version > limit]
        for group_id in old:
            await self._give_up(group_id, "stale")
        return old

    async def cancel(self, group_id: str | None) -> int:
        """Give up one group, or all; gives how many attempts were still to come."""
        if group_id is not None and group_id not in self._groups:
            return 0
        wanted = [group_id] if group_id is not None else list(self._groups)
        return sum([await self._give_up(one, "cancelled") for one in wanted])

    async def waiting(self) -> dict[str, int]:
        """Groups under way, with the attempts of each that are still to come."""
        return {group.id: len(group.to_come) for group in self._groups.values()}

    async def close(self) -> None:
        await self.cancel(None)
        self._life.cancel()
        await asyncio.wait([self._life])

    async def _give_up(self, group_id: str, why: Why) -> int:
        """Those that a worker commits at this very moment still count; all others come out with the reason."""
        group = self._groups[group_id]
        withdrawn = await self._store.withdraw([group.attempt_id(place) for place in group.to_come])
        for attempt_id in withdrawn:
            await self._put(self._score(group, int(attempt_id.rpartition(":")[2]), why=why))
        return len(withdrawn)

    async def _end_rollout(self, rollout: Rollout) -> None:
        group = self._groups.get(rollout.group_id or "")
        place = rollout.attempt - group.first if group is not None else -1
        if group is None or place not in group.to_come:
            return
        made = samples(rollout)
        if rollout.reward is None or not made.rows:
            reasons = "; ".join(dict.fromkeys(reason for one in made.refused for reason in one.reasons))
            message = rollout.error or reasons or "nothing was captured"
            scored = self._score(group, place, why="failed", message=message, rollout=rollout)
        else:
            scored = self._score(group, place, rows=made.rows, rollout=rollout)
        await self._put(scored)

    def _score(
        self,
        group: _Group,
        place: int,
        *,
        why: Why | None = None,
        message: str = "",
        rows: tuple[Sample, ...] = (),
        rollout: Rollout | None = None,
    ) -> Scored:
        group.to_come.discard(place)
        if not group.to_come:
            self._groups.pop(group.id, None)
        return Scored(
            group_id=group.id,
            task_id=group.task_id,
            number=place,
            size=group.size,
            left=len(group.to_come),
            version=group.version,
            rows=rows,
            reward=rollout.reward if rollout is not None else None,
            rollout_id=rollout.id if rollout is not None else None,
            why=why,
            message=message,
        )

    async def _put(self, scored: Scored) -> None:
        async with self._more:
            self._ready.append(scored)
            self._more.notify_all()


class RayRollouts:
    """The handle a trainer holds; its methods block, since trainers do. One may be used by several threads."""

    def __init__(
        self,
        *,
        store: str,
        policy: str,
        agent: str = DEFAULT_AGENT,
        verifier: Checks | None = None,
        hooks: Hooks | None = None,
        ray: RayOptions | None = None,
        **fields: Any,
    ) -> None:
        """`store` is one that all nodes reach; `policy` is who answers, as on the command line. `fields` are a
        run's own (`model`, `sandbox`, `limits` ...); with `max_staleness` a group is given up when the version that it was
        submitted at is so far behind, and with `when_stale="mask"` as well it ends, and its older answers do not train."""
        ray = ray or RayOptions()
        fields.setdefault("parallel", 16)
        config = RunConfig(agents=(agent,), policies={POLICY: policy}, **fields)
        order = ActorSpec(
            store=store,
            config=config,
            ray=ray,
            verifier=as_judge(verifier),
            hooks=hooks or Hooks(),
        )
        self._ray = connect_ray(ray.address)
        actor = self._ray.remote(Rollouts).options(name=ray.name, namespace=NAMESPACE, num_cpus=0, max_concurrency=64)
        self._actor: Any = actor.remote(order)
        started: StartResult = self._get(self._actor.start.remote())
        if started.error is not None:
            self._ray.kill(self._actor)
            raise ConfigError(started.error)
        self.run_id = started.run_id

    def submit(self, task: Task, *, size: int = 1, seed: int | None = None) -> str:
        """`size` attempts at a task; gives the group's id. Attempt n has the seed `seed + n`."""
        if size < 1:
            raise ConfigError(f"a group has at least one attempt, got {size}")
        return self._get(self._actor.submit.remote(task, size, seed))

    def take(self, *, max: int = 64, timeout: float = 60.0) -> list[Scored]:
        """What has finished, up to `max`, as soon as there is anything; [] when nothing came within `timeout`."""
        found: TakeResult = self._get(self._actor.take.remote(max, timeout), timeout + _ANSWER_S)
        if found.error is not None:
            raise Error(found.error)
        return list(found.scored)

    def update(self, version: int) -> list[str]:
        """The policy's version from now on. Groups that are too old by it are given up: their attempts come out of `take`
        with `why="stale"`. Gives their ids."""
        return self._get(self._actor.update.remote(version))

    def cancel(self, group_id: str | None = None) -> int:
        """Give up a group, or all of them; their attempts come out of `take` with `why="cancelled"`."""
        return self._get(self._actor.cancel.remote(group_id))

    def waiting(self) -> Mapping[str, int]:
        """Groups under way, with how many attempts of each are still to come."""
        return self._get(self._actor.waiting.remote())

    def close(self) -> None:
        """End the workers and the actor; what was not taken is in the store."""
        try:
            self._get(self._actor.close.remote())
        finally:
            self._ray.kill(self._actor)

    def _get(self, ref: Any, timeout_s: float = _ANSWER_S) -> Any:
        return self._ray.get(ref, timeout=timeout_s)
