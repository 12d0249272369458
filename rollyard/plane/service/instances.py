"""Instances: from an environment or a bare image to a running thing with an owner, a time to live and a history.

The order of steps is the whole point. Creation is journalled (with its quota) before the engine is asked; what the engine
made is written down before the caller gets it; deletion is written down before the engine is asked. A crash between any two
steps therefore leaves a row that the sweep settles, and never a thing without a row.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from rollyard.core.errors import (
    ConfigError,
    Error,
    PlaneConflict,
    PlaneGone,
    PlaneInvalid,
    PlaneNotFound,
    PlaneUnavailable,
    PlaneUnsupported,
    SandboxGone,
)
from rollyard.core.log import Log
from rollyard.core.plane import (
    RENEW_S,
    EnvSpec,
    Instance,
    InstanceEvent,
    InstanceState,
    OwnerUsage,
    PoolClaim,
    WarmPool,
)
from rollyard.core.protocols import Sandbox
from rollyard.net.paging import each_page
from rollyard.plane.engines.choose import refuse
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.service.access import snapshot_id
from rollyard.plane.service.builds import Builds
from rollyard.plane.service.call_rates import CallRates
from rollyard.plane.service.create_request import (
    FROM_POOL,
    CreateDefaults,
    CreateInstance,
    check_request,
    journal_instance,
    plan_instance,
    rollout_of,
    run_of,
)
from rollyard.plane.service.cursors import read_cursor, write_cursor
from rollyard.plane.service.drain import DrainState
from rollyard.plane.service.env_specs import EnvSpecs
from rollyard.plane.service.hub import MAX_PAGE, Hub
from rollyard.plane.service.request_note import note_creation, note_instance, say_origin
from rollyard.plane.storage.protocol import PlaneStore

_log = Log("rollyard.plane")
_AT_ONCE = 16
Preparation = Callable[[Instance, Sandbox], Awaitable[None]]


class Instances:
    def __init__(
        self,
        store: PlaneStore,
        hub: Hub,
        engines: Mapping[str, Engine],
        *,
        plane: str,
        settings: CreateDefaults | None = None,
        clock: Callable[[], float] = time.time,
        drain: DrainState | None = None,
        builds: Builds | None = None,
        rates: CallRates | None = None,
    ) -> None:
        self._drain = drain or DrainState()
        self._store, self.engines, self._plane = store, engines, plane
        self._specs = EnvSpecs(store, hub, engines, builds or Builds(store, clock=clock))
        self.settings = settings or CreateDefaults()
        self.clock, self.rates = clock, rates or CallRates()
        self.wanted = asyncio.Event()  # something was taken from a pool

    async def create(self, wanted: CreateInstance, *, owner: str, caller: str = "", key: str | None = None) -> Instance:
        """`key` is an Idempotency-Key: the same request again gives the instance that the first one made."""
        return (await self.create_once(wanted, owner=owner, caller=caller, key=key))[0]

    async def create_once(
        self,
        wanted: CreateInstance,
        *,
        owner: str,
        caller: str = "",
        key: str | None = None,
        prepare: Preparation | None = None,
    ) -> tuple[Instance, bool]:
        """The instance, and whether this request made it. `prepare` is what has to be done in a new one before it runs: one that
        cannot be prepared has failed, and is gone from its engine."""
        self._drain.refuse()
        note_creation()
        check_request(wanted, self.settings)
        request = (caller, key, hashlib.sha256(msgspec.json.encode(wanted)).digest()) if key else None
        if wanted.pool is not None:
            pool = await self._store.get_pool(wanted.pool)
            taken = await self._take_pooled(pool, wanted, owner, request)
            if taken is not None:
                return taken, True
            made_from = msgspec.json.decode(pool.plan, type=CreateInstance)
            given = {name: getattr(wanted, name) for name in FROM_POOL if name != "pool"}
            wanted = replace(made_from, **{name: value for name, value in given.items() if value})
        spec = EnvSpec(image=wanted.image or "") if wanted.env is None else await self._specs.find(wanted, owner)
        if wanted.image is not None:
            await self._specs.check_image(wanted.image, owner)
        new = plan_instance(wanted, spec, owner, self.engines, self.settings, self.clock())
        return await self._make(new, request, prepare)

    async def _take_pooled(
        self, pool: WarmPool, wanted: CreateInstance, owner: str, request: tuple[str, str, bytes] | None
    ) -> Instance | None:
        """One that waits in the pool and lives; None when there is none, and one is made."""
        plan = msgspec.json.decode(pool.plan, type=CreateInstance)
        claim = PoolClaim(
            owner=owner,
            at=self.clock(),
            run_id=run_of(wanted),
            rollout_id=rollout_of(wanted),
            labels=wanted.labels,
            idle_ttl_s=wanted.idle_ttl_s,
        )
        while True:
            taken = await self._store.take(pool, claim, terms=self.settings.terms, request=request)
            self.wanted.set()
            if taken is None or not taken[1]:
                return taken[0] if taken else None
            engine = self.engines.get(taken[0].engine)
            if engine is not None and taken[0].ref is not None and await engine.alive(taken[0].ref):
                break
            await self._store.end(taken[0].id, "failed", at=self.clock(), reason="its engine lost it")
            request = None  # it named the lost one
        ttl = wanted.ttl_s or plan.ttl_s or self.settings.default_ttl_s
        return await self.extend(taken[0].id, ttl) if engine.capabilities.extend else taken[0]

    async def make(self, new: Instance) -> Instance:
        """From the journal to running."""
        return (await self._make(new, None, None))[0]

    async def _make(
        self, new: Instance, request: tuple[str, str, bytes] | None, prepare: Preparation | None
    ) -> tuple[Instance, bool]:
        instance, made = await self._store.begin(new, terms=self.settings.terms, request=request)
        note_instance(instance)
        if not made:
            return instance, False
        engine = self.engines[instance.engine]
        try:
            async with asyncio.timeout(self.settings.boot_s):
                ref = await engine.create(instance, self._plane)
                if prepare is not None:
                    await self._prepare(instance, engine, ref, prepare)
        except (Error, TimeoutError, OSError) as error:
            await self._abandon(instance, engine, error)
            if isinstance(error, Error):
                raise
            raise PlaneUnavailable(f"engine {engine.name} did not make it: {error or 'too late'}") from error
        running = await self._store.step(instance.id, ("creating",), "running", at=self.clock(), ref=ref)
        if running is None:
            await engine.delete(ref)
            await self._store.end(instance.id, "deleted", at=self.clock(), reason="deleted while it was made")
            raise PlaneConflict(f"{instance.id} was deleted while it was made")
        return running, True

    async def _prepare(self, instance: Instance, engine: Engine, ref: str, prepare: Preparation) -> None:
        try:
            await prepare(instance, await engine.sandbox(ref))
        except BaseException:  # cancelled too: what is not ready is removed
            await asyncio.shield(engine.delete(ref))
            raise

    async def _abandon(self, instance: Instance, engine: Engine, error: Exception) -> None:
        """An engine that failed may have made something: it is only over once the engine's list says so. One that refused
        what it was asked for has made nothing."""
        if not isinstance(error, (PlaneInvalid, PlaneUnsupported, ConfigError)):
            try:
                listed = await engine.list(self._plane) if engine.capabilities.list else None
                for thing in listed or ():
                    if thing.instance_id == instance.id:
                        await engine.delete(thing.ref)
            except (Error, TimeoutError, OSError):
                listed = None
            if listed is None:
                _log.warning("what a failed creation left is unknown; the sweep settles it", instance=instance.id)
                return
        reason = str(error) or "the engine took too long"
        await self._store.end(instance.id, "failed", at=self.clock(), reason=reason)

    # what there is

    async def get(self, instance_id: str) -> Instance:
        """Raises `PlaneNotFound` for one that is gone; its history stays."""
        found = await self.record(instance_id)
        if not found.live:
            raise PlaneNotFound(f"instance {instance_id} is gone ({found.state})", hint="its history is still there")
        return found

    async def record(self, instance_id: str) -> Instance:
        """Also one that is gone."""
        found = await self._store.get_instance(instance_id)
        note_instance(found)
        return found

    async def look(self, found: Instance) -> Instance:
        """The record, once its engine was asked whether the thing itself lives."""
        engine = self.engines.get(found.engine)
        if found.state != "running" or found.ref is None or engine is None or await engine.alive(found.ref):
            return found
        await self._store.end(found.id, "failed", at=self.clock(), reason="its engine lost it")
        return await self.record(found.id)

    async def history(self, instance_id: str) -> list[InstanceEvent]:
        await self._store.get_instance(instance_id)
        return await self._store.history(instance_id)

    async def usage(self, owner: str) -> OwnerUsage:
        return await self._store.usage(owner)

    async def page(
        self,
        *,
        owner: str | None = None,
        env: str | None = None,
        run_id: str | None = None,
        rollout_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        live: bool | None = True,
        cursor: str | None = None,
        limit: int = 50,
    ) -> tuple[list[Instance], str | None]:
        if not 1 <= limit <= MAX_PAGE:
            raise PlaneInvalid(f"limit must be between 1 and {MAX_PAGE}")
        after = read_cursor(cursor, 1)
        found = await self._store.list_instances(
            owner=owner,
            env=env,
            run_id=run_id,
            rollout_id=rollout_id,
            live=live,
            labels=labels or {},
            after=after[0] if after else "",
            limit=limit + 1,
        )
        more = len(found) > limit
        found = found[:limit]
        return found, write_cursor(found[-1].id) if more else None

    def all(
        self,
        *,
        owner: str | None = None,
        env: str | None = None,
        run_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        live: bool | None = True,
    ) -> AsyncGenerator[Instance]:
        """Every one of these; without `live`, those that are gone too."""
        which = partial(self.page, owner=owner, env=env, run_id=run_id, labels=labels, live=live, limit=MAX_PAGE)
        return each_page(lambda cursor: which(cursor=cursor))

    # what can be done with one

    async def heartbeat(self, instance_id: str) -> Instance:
        return await self._touch(instance_id, None)

    async def extend(self, instance_id: str, ttl_s: float) -> Instance:
        """Its time ends `ttl_s` from now, for the engine and for the plane."""
        if not 0 < ttl_s <= self.settings.max_ttl_s:
            raise PlaneInvalid(f"ttl_s is above 0 and at most {self.settings.max_ttl_s:.0f}")
        return await self._extend(instance_id, ttl_s)

    async def _extend(self, instance_id: str, ttl_s: float) -> Instance:
        instance, engine = await self.get_standing(instance_id)
        if engine.capabilities.ttl and not engine.capabilities.extend:
            raise refuse(engine, self.engines, "extend", "extend an instance's time")
        if engine.capabilities.extend and instance.ref is not None:
            await engine.extend(instance.ref, instance.plan.engine_ttl_s(ttl_s))
        return await self._touch(instance_id, self.clock() + ttl_s)

    async def _touch(self, instance_id: str, expires_at: float | None) -> Instance:
        found = await self._store.touch(instance_id, at=self.clock(), expires_at=expires_at)
        if found is None:
            raise self._not_running(await self._store.get_instance(instance_id))
        return found

    async def running(self, instance_id: str) -> tuple[Instance, Engine]:
        return self.check_running(await self.record(instance_id))

    def check_running(self, found: Instance) -> tuple[Instance, Engine]:
        if found.state == "paused":
            raise self._not_running(found)
        return self.check_standing(found)

    async def get_standing(self, instance_id: str) -> tuple[Instance, Engine]:
        """One that runs or is paused."""
        return self.check_standing(await self.record(instance_id))

    def check_standing(self, found: Instance) -> tuple[Instance, Engine]:
        """The same of a record that was just read."""
        if found.state not in ("running", "paused") or found.ref is None:
            raise self._not_running(found)
        if found.engine not in self.engines:
            raise PlaneUnavailable(f"this server has no engine {found.engine}")
        return found, self.engines[found.engine]

    def _not_running(self, found: Instance) -> Error:
        if found.state == "creating":
            return PlaneConflict(f"instance {found.id} is still being created", hint="ask again in a moment")
        if found.state == "paused":
            return PlaneConflict(f"instance {found.id} is paused", hint="resume it first")
        return PlaneGone(f"instance {found.id} has ended ({found.state})", hint="create another")

    async def sandbox(self, instance_id: str, capability: str = "exec") -> Sandbox:
        """Where its programs run and its files are. One whose engine lost it is ended here and now."""
        instance, engine = self.check_running(await self.wake(await self.record(instance_id)))
        if not getattr(engine.capabilities, capability):
            raise refuse(engine, self.engines, capability, "run programs" if capability == "exec" else "reach files")
        self.rates.charge(instance.owner)
        sandbox = await self._sandbox(instance, engine)
        await self._store.touch(instance_id, at=self.clock())
        return sandbox

    async def sandbox_of(self, found: Instance) -> Sandbox:
        """The same of a record that was just read: no sign of life, and nothing to its owner's rate."""
        return await self._sandbox(*self.check_running(found))

    async def _sandbox(self, instance: Instance, engine: Engine) -> Sandbox:
        assert instance.ref is not None
        try:
            return await engine.sandbox(instance.ref)
        except SandboxGone as error:
            await self._store.end(instance.id, "failed", at=self.clock(), reason="its engine lost it")
            raise PlaneGone(f"instance {instance.id} is gone from its engine") from error

    async def pause(self, instance_id: str) -> Instance:
        """Its programs stand still; its time goes on. The engine is asked first: what a crash leaves is one that stands
        still and is said to run, which `resume` sets right."""
        return await self._set_going(instance_id, False)

    async def resume(self, instance_id: str) -> Instance:
        return await self._set_going(instance_id, True)

    async def wake(self, found: Instance) -> Instance:
        """A record that was just read; one that resumes by itself is resumed, for as long as it was made for."""
        if found.state != "paused" or not found.plan.auto_resume:
            return found
        await self.resume(found.id)
        return await self._extend(found.id, found.plan.ttl_s)

    async def settle_timeout(self, instance_id: str) -> Instance:
        """One that is paused when its time is over; one that is paused already gets more of it. Asked again it does no harm."""
        found = await self.get(instance_id)
        if found.expires_at > self.clock() or found.plan.on_timeout == "end":
            return found
        if found.state == "running" and found.plan.on_timeout == "stop":
            await self.stop(instance_id)
        elif found.state == "running":
            await self.pause(instance_id)
        return await self._extend(instance_id, RENEW_S)

    async def stop(self, instance_id: str) -> Instance:
        """Its programs end, its files stay, and it is paused."""
        async with asyncio.timeout(self.settings.boot_s):
            await (await self.sandbox_of(await self.record(instance_id))).kill_processes()
        return await self.pause(instance_id)

    async def _set_going(self, instance_id: str, going: bool) -> Instance:
        instance, engine = await self.get_standing(instance_id)
        if not engine.capabilities.pause:
            raise refuse(engine, self.engines, "pause", "pause an instance")
        self.rates.charge(instance.owner)
        sandbox = await self._sandbox(instance, engine)
        async with asyncio.timeout(self.settings.boot_s):
            await (sandbox.resume() if going else sandbox.pause())
        state: InstanceState = "running" if going else "paused"
        found = await self._store.step(instance_id, ("running", "paused"), state, at=self.clock())
        if found is None:
            raise self._not_running(await self._store.get_instance(instance_id))
        return found

    async def link(self, instance_id: str, rollout_id: str) -> Instance:
        """From here on the rollout's id leads to it."""
        instance, _ = await self.get_standing(instance_id)
        found = await self._store.step(
            instance_id, (instance.state,), instance.state, at=self.clock(), rollout_id=rollout_id
        )
        if found is None:
            raise self._not_running(await self._store.get_instance(instance_id))
        return found

    async def snapshot(self, instance_id: str) -> str:
        """The name of an image of what it has written; instances can be made from it on the same engine."""
        instance, engine = await self.running(instance_id)
        if not engine.capabilities.snapshot:
            raise refuse(engine, self.engines, "snapshot", "take snapshots")
        self.rates.charge(instance.owner)
        sandbox = await self._sandbox(instance, engine)
        async with asyncio.timeout(self.settings.boot_s):
            image = await sandbox.snapshot()
        await self._store.add_owner("snapshot", snapshot_id(image), instance.owner, at=self.clock())
        await self._store.step(instance_id, ("running",), "running", at=self.clock(), reason=f"snapshot {image}")
        return image

    async def fork(self, instance_id: str, count: int = 1) -> list[Instance]:
        """New instances that begin with what this one has written, each journalled like any other."""
        self._drain.refuse()
        instance, _ = await self.running(instance_id)
        plan = replace(instance.plan, image=await self.snapshot(instance_id))
        again = CreateInstance(
            env=instance.env,
            run_id=instance.run_id,
            labels={**instance.labels},
            idle_ttl_s=instance.idle_ttl_s,
        )
        now = self.clock()
        new = [journal_instance(plan, instance.engine, instance.owner, again, now, self.settings) for _ in range(count)]
        results = await asyncio.gather(*map(self.make, new), return_exceptions=True)
        made = [one for one in results if isinstance(one, Instance)]
        for error in results:
            if isinstance(error, BaseException):
                await self.delete_many([one.id for one in made])
                raise error
        return made

    async def delete(self, instance_id: str, *, reason: str | None = None) -> None:
        """Returns once the engine has confirmed; repeats are `PlaneNotFound`. One still being created is cancelled."""
        now = self.clock()
        found = await self.get(instance_id)
        settle = now + self.settings.boot_s
        marked = await self._store.step(
            instance_id, ("creating", "running", "paused", "deleting"), "deleting", at=now, settle_by=settle
        )
        if marked is None:
            raise PlaneNotFound(f"instance {instance_id} is gone")
        if found.state == "creating" and marked.ref is None:
            return  # its creator sees the mark and removes what it made; the sweep, should the creator have died
        engine = self.engines.get(marked.engine)
        if engine is None:
            raise PlaneUnavailable(f"this server has no engine {marked.engine}", hint="another replica sweeps it away")
        if marked.ref is not None:
            async with asyncio.timeout(self.settings.boot_s):
                await engine.delete(marked.ref)
        reason = reason or f"deleted {say_origin() or 'by its owner'}"
        await self._store.end(instance_id, "deleted", at=self.clock(), reason=reason)

    async def delete_many(self, instance_ids: Sequence[str]) -> dict[str, str]:
        """What became of each: `deleted`, `not_found`, or why not."""
        gate, ids = asyncio.Semaphore(_AT_ONCE), list(dict.fromkeys(instance_ids))

        async def outcome(instance_id: str) -> str:
            async with gate:
                return await self._outcome(instance_id)

        return dict(zip(ids, await asyncio.gather(*map(outcome, ids)), strict=True))

    async def _outcome(self, instance_id: str) -> str:
        try:
            await self.delete(instance_id)
        except PlaneNotFound:
            return "not_found"
        except (Error, TimeoutError, OSError) as error:
            return f"failed: {error}"
        return "deleted"
