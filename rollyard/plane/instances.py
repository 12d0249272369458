"""Instances: from an environment or a bare image to a running thing with an owner, a time to live and a history.

The order of steps is the whole point. Creation is journalled (with its quota) before the engine is asked; what the engine
made is written down before anybody is told; deletion is written down before the engine is asked. A crash between any two
steps therefore leaves a row that the sweep settles, and never a thing without a row.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

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
    UnknownName,
)
from rollyard.core.ids import new_id
from rollyard.core.plane import EnvSpec, Happening, Instance, InstancePlan, Terms
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Mount, Network, Resources
from rollyard.plane.cursors import read_cursor, write_cursor
from rollyard.plane.engines import Engine, chosen, refuse
from rollyard.plane.hub import MAX_PAGE, Hub
from rollyard.plane.storage import PlaneStore

_log = structlog.get_logger("rollyard.plane")


class CreateInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `env` (`name@version`) or `image`. What is given here wins over what the environment says."""

    env: str | None = None
    image: str | None = None
    engine: str | None = None
    owner: str | None = None
    run_id: str | None = None
    rollout_id: str | None = None
    ttl_s: float | None = None
    idle_ttl_s: float | None = None
    labels: dict[str, str] = {}
    environment: dict[str, str] = {}
    start: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    mount_points: tuple[Mount, ...] = ()
    resources: Resources | None = None
    network: Network | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    default_ttl_s: float = 1800.0
    max_ttl_s: float = 7 * 86400.0
    boot_s: float = 300.0  # the most an engine may take to create or delete
    terms: Terms = Terms()


class Instances:
    def __init__(
        self,
        store: PlaneStore,
        hub: Hub,
        engines: Mapping[str, Engine],
        *,
        plane: str,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._hub, self.engines, self._plane = store, hub, engines, plane
        self.settings = settings or Settings()
        self._clock = clock

    async def create(self, asked: CreateInstance, *, owner: str, caller: str = "", key: str | None = None) -> Instance:
        """`key` is an Idempotency-Key: the same request again gives the instance that the first one made."""
        new = await self._planned(asked, owner)
        request = (caller, key, hashlib.sha256(msgspec.json.encode(asked)).digest()) if key else None
        instance, made = await self._store.begin(new, terms=self.settings.terms, request=request)
        if not made:
            return instance
        engine = self.engines[instance.engine]
        try:
            async with asyncio.timeout(self.settings.boot_s):
                ref = await engine.create(instance, self._plane)
        except (Error, TimeoutError, OSError) as error:
            await self._abandoned(instance, engine, error)
            if isinstance(error, Error):
                raise
            raise PlaneUnavailable(f"engine {engine.name} did not make it: {error or 'too late'}") from error
        running = await self._store.step(instance.id, ("creating",), "running", at=self._clock(), ref=ref)
        if running is None:
            await engine.delete(ref)
            await self._store.end(instance.id, "deleted", at=self._clock(), reason="deleted while it was made")
            raise PlaneConflict(f"{instance.id} was deleted while it was made")
        return running

    async def _abandoned(self, instance: Instance, engine: Engine, error: Exception) -> None:
        """An engine that failed may have made something: it is only over once the engine's list says so. One that refused
        what it was asked for has made nothing."""
        if not isinstance(error, (PlaneInvalid, PlaneUnsupported, ConfigError)):
            try:
                listed = await engine.list(self._plane) if engine.abilities.list else None
                for thing in listed or ():
                    if thing.instance_id == instance.id:
                        await engine.delete(thing.ref)
            except (Error, TimeoutError, OSError):
                listed = None
            if listed is None:
                _log.warning("nobody knows what a failed creation left; the sweep settles it", instance=instance.id)
                return
        reason = str(error) or "the engine took too long"
        await self._store.end(instance.id, "failed", at=self._clock(), reason=reason)

    async def _planned(self, asked: CreateInstance, owner: str) -> Instance:
        if (asked.env is None) == (asked.image is None):
            raise PlaneInvalid("give either env or image")
        spec = EnvSpec(image=asked.image or "") if asked.env is None else await self._env(asked.env)
        try:
            engine = chosen(self.engines, asked.engine or spec.engine)
        except UnknownName as error:
            raise PlaneInvalid(error.message) from error
        ttl = asked.ttl_s or spec.ttl_s or self.settings.default_ttl_s
        idle = asked.idle_ttl_s
        if not 0 < ttl <= self.settings.max_ttl_s or (idle is not None and not idle > 0):
            raise PlaneInvalid(f"times to live are above 0 and at most {self.settings.max_ttl_s:.0f} s")
        plan = InstancePlan(
            image=asked.image or spec.image,
            env={**spec.env, **asked.environment},
            start=asked.start or spec.start,
            port=spec.port,
            arguments=asked.arguments,
            mounts=asked.mount_points,
            resources=asked.resources or spec.resources,
            network=asked.network or spec.network,
            ttl_s=ttl,
        )
        if plan.arguments and not plan.start:
            raise PlaneInvalid("arguments are for a program", hint="give start, or an environment that has one")
        self._honours(engine, plan)
        now = self._clock()
        return Instance(
            id=new_id("inst"),
            owner=owner,
            engine=engine.name,
            state="creating",
            live=True,
            plan=plan,
            env=asked.env,
            run_id=asked.run_id,
            rollout_id=asked.rollout_id,
            labels=asked.labels,
            created_at=now,
            updated_at=now,
            last_seen_at=now,
            expires_at=now + ttl,
            idle_ttl_s=idle,
            settle_by=now + 2 * self.settings.boot_s,
        )

    async def _env(self, text: str) -> EnvSpec:
        name, separator, version = text.partition("@")
        if not separator or not name or not version:
            raise PlaneInvalid(f"env {text!r} is not name@version")
        return (await self._hub.get(name, version)).spec

    def _honours(self, engine: Engine, plan: InstancePlan) -> None:
        asked = {
            "mounts": ("mount directories", bool(plan.mounts)),
            "arguments": ("start a program with arguments", bool(plan.start or plan.arguments)),
            "accelerators": ("give accelerators", plan.resources.accelerated),
            "images": ("run images", plan.image != "host"),
            "network_none": ("cut the network off", plan.network == "none"),
            "network_allowlist": ("limit the network to a list", plan.network == "allowlist"),
        }
        for ability, (what, wanted) in asked.items():
            if wanted and not getattr(engine.abilities, ability):
                raise refuse(engine, self.engines, ability, what)

    # what there is

    async def get(self, instance_id: str) -> Instance:
        """Raises `PlaneNotFound` for one that is gone; its history stays."""
        found = await self._store.get_instance(instance_id)
        if not found.live:
            raise PlaneNotFound(f"instance {instance_id} is gone ({found.state})", hint="its history is still there")
        return found

    async def record(self, instance_id: str) -> Instance:
        """Also one that is gone."""
        return await self._store.get_instance(instance_id)

    async def history(self, instance_id: str) -> list[Happening]:
        await self._store.get_instance(instance_id)
        return await self._store.history(instance_id)

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

    # what can be done with one

    async def heartbeat(self, instance_id: str) -> Instance:
        return await self._touched(instance_id, None)

    async def extend(self, instance_id: str, ttl_s: float) -> Instance:
        """Its time ends `ttl_s` from now, for the engine and for the plane."""
        if not 0 < ttl_s <= self.settings.max_ttl_s:
            raise PlaneInvalid(f"ttl_s is above 0 and at most {self.settings.max_ttl_s:.0f}")
        instance, engine = await self.running(instance_id)
        if engine.abilities.ttl and not engine.abilities.extend:
            raise refuse(engine, self.engines, "extend", "extend an instance's time")
        if engine.abilities.extend and instance.ref is not None:
            await engine.extend(instance.ref, ttl_s)
        return await self._touched(instance_id, self._clock() + ttl_s)

    async def _touched(self, instance_id: str, expires_at: float | None) -> Instance:
        found = await self._store.touch(instance_id, at=self._clock(), expires_at=expires_at)
        if found is None:
            raise self._not_running(await self._store.get_instance(instance_id))
        return found

    async def running(self, instance_id: str) -> tuple[Instance, Engine]:
        found = await self._store.get_instance(instance_id)
        if found.state != "running" or found.ref is None:
            raise self._not_running(found)
        if found.engine not in self.engines:
            raise PlaneUnavailable(f"this server has no engine {found.engine}")
        return found, self.engines[found.engine]

    def _not_running(self, found: Instance) -> Error:
        if found.state == "creating":
            return PlaneConflict(f"instance {found.id} is still being created", hint="ask again in a moment")
        return PlaneGone(f"instance {found.id} has ended ({found.state})", hint="create another")

    async def sandbox(self, instance_id: str, ability: str = "exec") -> Sandbox:
        """Where its programs run and its files are. One whose engine lost it is ended here and now."""
        instance, engine = await self.running(instance_id)
        if not getattr(engine.abilities, ability):
            raise refuse(engine, self.engines, ability, "run programs" if ability == "exec" else "reach files")
        assert instance.ref is not None
        try:
            sandbox = await engine.sandbox(instance.ref)
        except SandboxGone as error:
            await self._store.end(instance_id, "failed", at=self._clock(), reason="its engine lost it")
            raise PlaneGone(f"instance {instance_id} is gone from its engine") from error
        await self._store.touch(instance_id, at=self._clock())
        return sandbox

    async def delete(self, instance_id: str, *, reason: str = "deleted by its owner") -> None:
        """Returns once the engine has confirmed; repeats are `PlaneNotFound`. One still being created is cancelled."""
        now = self._clock()
        found = await self.get(instance_id)
        settle = now + self.settings.boot_s
        marked = await self._store.step(
            instance_id, ("creating", "running", "deleting"), "deleting", at=now, settle_by=settle
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
        await self._store.end(instance_id, "deleted", at=self._clock(), reason=reason)

    async def delete_many(self, instance_ids: Sequence[str]) -> dict[str, str]:
        """What became of each: `deleted`, `not_found`, or why not."""
        return {instance_id: await self._outcome(instance_id) for instance_id in dict.fromkeys(instance_ids)}

    async def _outcome(self, instance_id: str) -> str:
        try:
            await self.delete(instance_id)
        except PlaneNotFound:
            return "not_found"
        except (Error, TimeoutError, OSError) as error:
            return f"failed: {error}"
        return "deleted"
