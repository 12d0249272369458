"""Sandboxes that are the control plane's instances: its keys, owners, quotas, times to live, sweep and history hold for them.

A template is one that a client built, an environment (`name@version`), `base` (the default engine's own image) or an image by its
name.
Every running instance of the caller's owner shows, however it was made, if its engine can run programs. Sandboxes and the
programs in them are known to every replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollyard.core.errors import Error, PlaneConflict, PlaneForbidden, PlaneGone, PlaneNotFound, SandboxGone
from rollyard.core.plane import ApiKey, Instance
from rollyard.core.sandbox import Resources
from rollyard.plane.compat.e2b.boxes import (
    E2bCreate,
    E2bSandbox,
    SandboxTokens,
    SandboxView,
    make_box,
    owner_of,
    read_create,
)
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.programs import E2bProgram, KeptPrograms
from rollyard.plane.compat.e2b.template_builds import remove_image, start_or_kill
from rollyard.plane.compat.e2b.templates import BASE, TemplateBuild, Templates
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import sees
from rollyard.plane.service.instances import CreateInstance
from rollyard.plane.service.shelf import Shelf

_LOOK_S = 0.1
_AT_HAND = 1000  # sandboxes; those that run nothing are looked up again


class InstanceBoxes:
    def __init__(self, plane: PlaneParts, *, secret: bytes, folder: Path) -> None:
        self._instances, self._access = plane.instances, plane.access
        self._programs = Shelf(plane.store, "e2b_program", E2bProgram)
        self.tokens, self.templates = SandboxTokens(secret), Templates(folder)
        self._boxes: dict[str, E2bSandbox] = {}

    def list_known(self) -> list[str]:
        return list(self._boxes)

    async def forget_image(self, image: str) -> None:
        for engine in self._instances.engines.values():
            if isinstance(engine, BackendEngine):
                await remove_image(engine.backend, image)

    async def admit(self, key: str) -> ApiKey | None:
        found = await self._access.caller(f"Bearer {key}")
        if found.role == "agent":
            raise PlaneForbidden("a key of role agent may not do this", hint="use a trainer's")
        return found

    async def create(
        self,
        caller: ApiKey | None,
        asked: Mapping[str, Any],
        idempotency_key: str | None,
        *,
        resources: Resources | None = None,
    ) -> E2bSandbox:
        wanted = read_create(asked)
        build = None if wanted.template == BASE else self.templates.ready(owner_of(caller), wanted.template)
        box = await self._make(_check_known(caller), _to_request(wanted, build, resources), idempotency_key)
        if build is not None:
            await start_or_kill(box, build)
        return box

    async def _make(self, caller: ApiKey, wanted: CreateInstance, key: str | None) -> E2bSandbox:
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
            self._boxes.pop(instance.id, None)
            raise SandboxGone(error.message) from error
        except PlaneConflict as error:  # a paused one answers nothing, as at the vendor's
            raise SandboxGone(error.message) from error
        box = self._boxes.get(instance.id)
        if box is None or box.sandbox is not sandbox:
            if len(self._boxes) >= _AT_HAND:
                self._boxes = {name: old for name, old in self._boxes.items() if not old.processes.idle}
            image = instance.plan.image
            kept = KeptPrograms(self._programs, instance.id)
            box = make_box(instance.id, _template(instance, self.templates), image, sandbox, self.templates, kept)
            self._boxes[instance.id] = box
        await box.accounts.prepare()
        return box

    async def find(self, sandbox_id: str, *, wake: bool = True) -> E2bSandbox:
        found = await self._record(sandbox_id)
        if found.state == "paused" and not wake:
            raise SandboxGone(f"sandbox {sandbox_id} is paused")
        return await self._box(found)

    async def _record(self, sandbox_id: str) -> Instance:
        """One past its end is gone, or paused, also when the sweep has yet to come by."""
        try:
            found = await self._instances.get(sandbox_id)
            if _over(found) and not found.ends_with_its_time:
                found = await self._instances.settle_timeout(sandbox_id)
        except (PlaneGone, PlaneNotFound) as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error
        if _over(found):
            raise SandboxGone(f"sandbox {sandbox_id} is past its end")
        return found

    async def _own(self, caller: ApiKey | None, sandbox_id: str) -> Instance:
        found = await self._record(sandbox_id)
        try:
            sees(_check_known(caller), found)
        except PlaneNotFound as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error
        return found

    async def view(self, caller: ApiKey | None, sandbox_id: str) -> SandboxView:
        return self._view(await self._own(caller, sandbox_id))

    async def list(self, caller: ApiKey | None, metadata: Mapping[str, str]) -> list[SandboxView]:
        every = self._instances.all(owner=_check_known(caller).owner, labels=metadata)
        found = [
            one
            async for one in every
            if one.state in ("running", "paused") and not (_over(one) and one.ends_with_its_time) and self._runs(one)
        ]
        return [self._view(one) for one in sorted(found, key=lambda one: (-one.created_at, one.id))]

    def _view(self, instance: Instance) -> SandboxView:
        return SandboxView(
            id=instance.id,
            template=_template(instance, self.templates),
            created_at=instance.created_at,
            expires_at=instance.expires_at,
            metadata=instance.labels,
            state="paused" if instance.state == "paused" or _over(instance) else "running",
            on_timeout=instance.plan.on_timeout,
            auto_resume=instance.plan.auto_resume,
            hosts=instance.plan.allowed_hosts,
            resources=instance.plan.resources,
        )

    def _runs(self, instance: Instance) -> bool:
        engine = self._instances.engines.get(instance.engine)
        return engine is not None and engine.abilities.exec

    async def kill(self, caller: ApiKey | None, sandbox_id: str) -> None:
        own = await self._own(caller, sandbox_id)
        try:
            await self._instances.delete(own.id)
        except PlaneNotFound as error:
            raise SandboxGone(error.message) from error
        self._boxes.pop(own.id, None)

    async def extend(self, caller: ApiKey | None, sandbox_id: str, seconds: float) -> None:
        await self._instances.extend((await self._own(caller, sandbox_id)).id, seconds)

    async def pause(self, caller: ApiKey | None, sandbox_id: str, *, memory: bool = True) -> None:
        """Its time does not go on: it is kept as long as anything is, and the connect that resumes it says for how long."""
        own = await self._own(caller, sandbox_id)
        paused = await (self._instances.pause(own.id) if memory else self._instances.stop(own.id))
        if paused.plan.on_timeout == "end" and self._instances.engines[own.engine].abilities.extend:
            await self._instances.extend(own.id, self._instances.settings.max_ttl_s)

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
            allowed_hosts=own.plan.allowed_hosts,
        )
        outcomes: list[E2bSandbox | Error] = []
        for _ in range(count):
            try:
                outcomes.append(await self._make(_check_known(caller), wanted, None))
            except Error as error:
                outcomes.append(error)
        return outcomes


def _check_known(caller: ApiKey | None) -> ApiKey:
    if caller is None:
        raise E2bRefusal("unauthenticated", "the API key is not known here")
    return caller


def _to_request(asked: E2bCreate, build: TemplateBuild | None, resources: Resources | None) -> CreateInstance:
    env = asked.template if "@" in asked.template and build is None else None
    image = "host" if asked.template == BASE else build.image if build is not None else asked.template
    resources = resources or (build.resources if build is not None else None)
    return CreateInstance(
        env=env,
        image=None if env else image,
        ttl_s=asked.seconds,
        labels=asked.metadata,
        environment={**(build.env if build is not None else {}), **asked.env},
        resources=None if resources == Resources() else resources,
        network="allowlist" if asked.hosts else "none" if asked.internet is False else None,
        allowed_hosts=asked.hosts,
        on_timeout=asked.on_timeout,
        auto_resume=asked.auto_resume,
    )


def _over(instance: Instance) -> bool:
    return instance.expires_at is not None and instance.expires_at <= time.time()


def _template(instance: Instance, templates: Templates) -> str:
    if instance.env or instance.plan.image == "host":
        return instance.env or BASE
    found = templates.of_image(instance.plan.image)
    return found[0].id if found is not None else instance.plan.image
