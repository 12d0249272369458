"""Sandboxes that are the control plane's instances: its keys, owners, quotas, times to live, sweep and history hold for them.

A template is an environment (`name@version`), `base` (the default engine's own image) or an image or snapshot by its name.
Every running instance of the caller's owner shows, however it was made, if its engine can run programs. Programs are known to
the server that started them; a sandbox is known to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollyard.core.errors import Error, PlaneConflict, PlaneForbidden, PlaneGone, PlaneNotFound, SandboxGone
from rollyard.core.plane import ApiKey, Instance
from rollyard.plane.access import Access, sees
from rollyard.plane.e2b.boxes import E2bCreate, E2bSandbox, SandboxTokens, SandboxView, read_create
from rollyard.plane.e2b.errors import E2bRefusal
from rollyard.plane.e2b.processes import Processes
from rollyard.plane.instances import CreateInstance, Instances

_BASE = "base"
_LOOK_S = 0.1


class InstanceBoxes:
    def __init__(self, instances: Instances, access: Access, *, secret: bytes) -> None:
        self._instances, self._access = instances, access
        self.tokens = SandboxTokens(secret)
        self._processes: dict[str, Processes] = {}

    async def admit(self, key: str) -> ApiKey | None:
        found = await self._access.caller(f"Bearer {key}")
        if found.role == "agent":
            raise PlaneForbidden("a key of role agent may not do this", hint="use a trainer's")
        return found

    async def create(self, caller: ApiKey | None, asked: Mapping[str, Any], idempotency_key: str | None) -> E2bSandbox:
        return await self._made(_known(caller), _wanted(read_create(asked)), idempotency_key)

    async def _made(self, caller: ApiKey, wanted: CreateInstance, key: str | None) -> E2bSandbox:
        instance = await self._instances.create(wanted, owner=caller.owner, caller=caller.id, key=key)
        async with asyncio.timeout(self._instances.settings.boot_s):
            while instance.state == "creating":  # an earlier try with this key is at it
                await asyncio.sleep(_LOOK_S)
                instance = await self._instances.record(instance.id)
        return await self._box(instance)

    async def _box(self, instance: Instance) -> E2bSandbox:
        try:
            sandbox = await self._instances.sandbox(instance.id)
        except (PlaneGone, PlaneNotFound) as error:
            self._processes.pop(instance.id, None)
            raise SandboxGone(error.message) from error
        except PlaneConflict as error:  # a paused one answers nothing, as at the vendor's
            raise SandboxGone(error.message) from error
        if instance.id not in self._processes:
            for idle in [name for name, programs in self._processes.items() if programs.idle]:
                del self._processes[idle]
            self._processes[instance.id] = Processes(sandbox)
        return E2bSandbox(instance.id, _template(instance), sandbox, self._processes[instance.id])

    async def find(self, sandbox_id: str) -> E2bSandbox:
        return await self._box(await self._record(sandbox_id))

    async def _record(self, sandbox_id: str) -> Instance:
        try:
            return await self._instances.get(sandbox_id)
        except PlaneNotFound as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error

    async def _own(self, caller: ApiKey | None, sandbox_id: str) -> Instance:
        found = await self._record(sandbox_id)
        try:
            sees(_known(caller), found)
        except PlaneNotFound as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error
        return found

    async def seen(self, caller: ApiKey | None, sandbox_id: str) -> SandboxView:
        return _seen(await self._own(caller, sandbox_id))

    async def list(self, caller: ApiKey | None, metadata: Mapping[str, str]) -> list[SandboxView]:
        every = self._instances.all(owner=_known(caller).owner, labels=metadata)
        found = [one async for one in every if one.state in ("running", "paused") and self._runs(one)]
        return [_seen(one) for one in sorted(found, key=lambda one: (-one.created_at, one.id))]

    def _runs(self, instance: Instance) -> bool:
        engine = self._instances.engines.get(instance.engine)
        return engine is not None and engine.abilities.exec

    async def kill(self, caller: ApiKey | None, sandbox_id: str) -> None:
        own = await self._own(caller, sandbox_id)
        try:
            await self._instances.delete(own.id)
        except PlaneNotFound as error:
            raise SandboxGone(error.message) from error
        self._processes.pop(own.id, None)

    async def extend(self, caller: ApiKey | None, sandbox_id: str, seconds: float) -> None:
        await self._instances.extend((await self._own(caller, sandbox_id)).id, seconds)

    async def pause(self, caller: ApiKey | None, sandbox_id: str) -> None:
        """Its programs stand still; unlike the vendor's, its time goes on."""
        await self._instances.pause((await self._own(caller, sandbox_id)).id)

    async def resume(self, caller: ApiKey | None, sandbox_id: str) -> None:
        await self._instances.resume((await self._own(caller, sandbox_id)).id)

    async def snapshot(self, caller: ApiKey | None, sandbox_id: str) -> str:
        """What comes back is an image, and so a template, on the same engine."""
        return await self._instances.snapshot((await self._own(caller, sandbox_id)).id)

    async def fork(
        self, caller: ApiKey | None, sandbox_id: str, seconds: float, count: int
    ) -> list[E2bSandbox | Error]:
        """New instances from one snapshot, each with its own quota: some may be made and others refused."""
        own = await self._own(caller, sandbox_id)
        wanted = CreateInstance(
            image=await self.snapshot(caller, sandbox_id),
            engine=own.engine,
            run_id=own.run_id,
            ttl_s=seconds,
            labels=dict(own.labels),
            environment=dict(own.plan.env),
            resources=own.plan.resources,
            network=own.plan.network,
        )
        outcomes: list[E2bSandbox | Error] = []
        for _ in range(count):
            try:
                outcomes.append(await self._made(_known(caller), wanted, None))
            except Error as error:
                outcomes.append(error)
        return outcomes


def _known(caller: ApiKey | None) -> ApiKey:
    if caller is None:
        raise E2bRefusal("unauthenticated", "the API key is not known here")
    return caller


def _wanted(asked: E2bCreate) -> CreateInstance:
    if asked.hosts:
        raise E2bRefusal(
            "unimplemented", "an instance's network is its environment's; allowOut is not served here", 400
        )
    env = asked.template if "@" in asked.template else None
    return CreateInstance(
        env=env,
        image=None if env else "host" if asked.template == _BASE else asked.template,
        ttl_s=asked.seconds,
        labels=asked.metadata,
        environment=asked.env,
        network="none" if asked.internet is False else None,
    )


def _template(instance: Instance) -> str:
    return instance.env or (_BASE if instance.plan.image == "host" else instance.plan.image)


def _seen(instance: Instance) -> SandboxView:
    return SandboxView(
        id=instance.id,
        template=_template(instance),
        created_at=instance.created_at,
        expires_at=instance.expires_at,
        metadata=instance.labels,
        state="paused" if instance.state == "paused" else "running",
        resources=instance.plan.resources,
    )
