"""Sandboxes that are the control plane's instances: its keys, owners, quotas, times to live, sweep and history hold for them.

A template is one that a client built, an environment (`name@version`), `base` (the default engine's own image) or an image by its
name.
Every running instance of the caller's owner shows, however it was made, if its engine can run programs. Sandboxes and the
programs in them are known to every replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rollyard.core.errors import (
    Error,
    PlaneConflict,
    PlaneForbidden,
    PlaneGone,
    PlaneNotFound,
    PlaneUnavailable,
    SandboxGone,
    UnknownName,
)
from rollyard.core.plane import ApiKey, Instance
from rollyard.core.protocols import Backend, OwnImages, Sandbox
from rollyard.core.sandbox import Resources, is_path
from rollyard.images.store import ImageStore
from rollyard.plane.compat.e2b.boxes import (
    E2bCreate,
    E2bSandbox,
    SandboxTokens,
    SandboxView,
    make_box,
    read_create,
)
from rollyard.plane.compat.e2b.errors import E2bRefusal
from rollyard.plane.compat.e2b.programs import E2bProgram, KeptPrograms
from rollyard.plane.compat.e2b.template_start import run_start
from rollyard.plane.compat.e2b.templates import BASE, TemplateBuild, Templates
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import check_visible
from rollyard.plane.service.instances import CreateInstance
from rollyard.plane.service.typed_records import TypedRecords

_KEYLESS = ApiKey(id="e2b", digest=b"", role="owner", owner="local", created_at=0.0)
_LOOK_S = 0.1
_AT_HAND = 1000  # sandboxes; those that run nothing are looked up again


class InstanceBoxes:
    def __init__(self, plane: PlaneParts, *, secret: bytes, anonymous: bool = False) -> None:
        self._instances, self._access, self._anonymous = plane.instances, plane.access, anonymous
        self.clock = plane.clock
        self._programs = TypedRecords(plane.store, "e2b_program", E2bProgram, clock=plane.clock)
        self.tokens, self.templates = SandboxTokens(secret), Templates(plane.store, clock=plane.clock)
        self.builds = plane.builds  # what its steps may reach is the operator's word for all builds
        self._boxes: dict[str, E2bSandbox] = {}

    async def find_by_token(self, holds: Callable[[str], bool]) -> str | None:
        """The sandbox whose token `holds`, for requests that name none: of those that this server has met, then of all."""
        for name in list(self._boxes):
            if holds(self.tokens.of(name)):
                return name
        async for one in self._instances.all():
            if one.id not in self._boxes and holds(self.tokens.of(one.id)):
                return one.id
        return None

    async def forget_image(self, image: str) -> None:
        for engine in self._instances.engines.values():
            if isinstance(engine, BackendEngine):
                await _remove_image(engine.backend, image)

    async def admit(self, key: str) -> ApiKey:
        if self._anonymous:
            return _KEYLESS
        found = await self._access.caller(f"Bearer {key}")
        if found.role == "agent":
            raise PlaneForbidden("a key of role agent may not do this", hint="use a trainer's")
        return found

    async def create(self, caller: ApiKey, fields: Mapping[str, Any], idempotency_key: str | None) -> E2bSandbox:
        wanted = read_create(fields)
        build = None if wanted.template == BASE else await self.templates.ready(caller.owner, wanted.template)
        return await self._make(caller, _to_request(wanted, build, None), build, idempotency_key)

    async def _make(
        self, caller: ApiKey, wanted: CreateInstance, build: TemplateBuild | None, key: str | None
    ) -> E2bSandbox:
        async def prepare(row: Instance, sandbox: Sandbox) -> None:
            if build is not None:
                await _start(make_box(row.id, build.template, build.image, sandbox, build), build)

        instance, _ = await self._instances.create_once(
            wanted, owner=caller.owner, caller=caller.id, key=key, prepare=prepare
        )
        async with asyncio.timeout(self._instances.settings.boot_s):
            while instance.state == "creating":  # an earlier try with this key is at it
                await asyncio.sleep(_LOOK_S)
                instance = await self._instances.record(instance.id)
        return await self._box(instance)

    # where templates are built

    async def open_build(self, build: TemplateBuild, base: str, seconds: float) -> E2bSandbox:
        hosts = self.builds.hosts
        options = E2bCreate(template=base, seconds=seconds, metadata={}, env={}, internet=None, hosts=hosts)
        origin = None if base == BASE else await self.templates.ready(build.owner, base)
        wanted = _to_request(options, origin, build.resources)
        made = await self._instances.create(wanted, owner=build.owner, caller=build.key_id)
        build.sandbox = made.id
        return await self._box(made)

    async def snapshot_build(self, build: TemplateBuild) -> str:
        return await self._instances.snapshot(build.sandbox or "")

    async def end_build(self, build: TemplateBuild) -> None:
        """Its sandbox, if there is one."""
        if build.sandbox is not None:
            with suppress(PlaneNotFound):
                await self._instances.delete(build.sandbox)
            self._boxes.pop(build.sandbox, None)
            build.sandbox = None

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
            build = None if image == "host" else await self.templates.of_image(image)
            box = make_box(instance.id, _template(instance, build), image, sandbox, build, kept)
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
            if self._over(found) and not found.ends_with_its_time:
                found = await self._instances.settle_timeout(sandbox_id)
        except (PlaneGone, PlaneNotFound) as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error
        if self._over(found):
            raise SandboxGone(f"sandbox {sandbox_id} is past its end")
        return found

    def _over(self, instance: Instance) -> bool:
        return instance.expires_at is not None and instance.expires_at <= self.clock()

    async def _find_own(self, caller: ApiKey, sandbox_id: str) -> Instance:
        found = await self._record(sandbox_id)
        try:
            check_visible(caller, found)
        except PlaneNotFound as error:
            raise SandboxGone(f"sandbox {sandbox_id} is gone") from error
        return found

    async def view(self, caller: ApiKey, sandbox_id: str) -> SandboxView:
        return await self._view(await self._find_own(caller, sandbox_id), {})

    async def list(self, caller: ApiKey, metadata: Mapping[str, str]) -> list[SandboxView]:
        every = self._instances.all(owner=caller.owner, labels=metadata)
        found = [
            one
            async for one in every
            if one.state in ("running", "paused")
            and not (self._over(one) and one.ends_with_its_time)
            and self._runs(one)
        ]
        known: dict[str, TemplateBuild | None] = {}
        return [await self._view(one, known) for one in sorted(found, key=lambda one: (-one.created_at, one.id))]

    async def _view(self, instance: Instance, known: dict[str, TemplateBuild | None]) -> SandboxView:
        """`known` are builds by their image, as far as they were looked up."""
        image = instance.plan.image
        if image != "host" and image not in known:
            known[image] = await self.templates.of_image(image)
        return SandboxView(
            id=instance.id,
            template=_template(instance, known.get(image)),
            created_at=instance.created_at,
            expires_at=instance.expires_at,
            metadata=instance.labels,
            state="paused" if instance.state == "paused" or self._over(instance) else "running",
            on_timeout=instance.plan.on_timeout,
            auto_resume=instance.plan.auto_resume,
            hosts=instance.plan.allowed_hosts,
            resources=instance.plan.resources,
        )

    def _runs(self, instance: Instance) -> bool:
        engine = self._instances.engines.get(instance.engine)
        return engine is not None and engine.capabilities.exec

    async def kill(self, caller: ApiKey, sandbox_id: str) -> None:
        own = await self._find_own(caller, sandbox_id)
        try:
            await self._instances.delete(own.id)
        except PlaneNotFound as error:
            raise SandboxGone(error.message) from error
        self._boxes.pop(own.id, None)

    async def extend(self, caller: ApiKey, sandbox_id: str, seconds: float) -> None:
        await self._instances.extend((await self._find_own(caller, sandbox_id)).id, seconds)

    async def pause(self, caller: ApiKey, sandbox_id: str, *, memory: bool = True) -> None:
        """Its time does not go on: it is kept as long as anything is, and the connect that resumes it says for how long."""
        own = await self._find_own(caller, sandbox_id)
        paused = await (self._instances.pause(own.id) if memory else self._instances.stop(own.id))
        if paused.plan.on_timeout == "end" and self._instances.engines[own.engine].capabilities.extend:
            await self._instances.extend(own.id, self._instances.settings.max_ttl_s)

    async def resume(self, caller: ApiKey, sandbox_id: str) -> None:
        await self._instances.resume((await self._find_own(caller, sandbox_id)).id)

    async def snapshot(self, caller: ApiKey, sandbox_id: str) -> str:
        """What comes back is an image, and so a template, on the same engine."""
        return await self._instances.snapshot((await self._find_own(caller, sandbox_id)).id)

    async def fork(self, caller: ApiKey, sandbox_id: str, seconds: float, count: int) -> list[E2bSandbox | Error]:
        """New instances from one snapshot, each with its own quota: some may be made and others refused."""
        own = await self._find_own(caller, sandbox_id)
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
                outcomes.append(await self._make(caller, wanted, None, None))
            except Error as error:
                outcomes.append(error)
        return outcomes


def _to_request(wanted: E2bCreate, build: TemplateBuild | None, resources: Resources | None) -> CreateInstance:
    if build is None and is_path(wanted.template):
        raise E2bRefusal(
            "not_found", f"template '{wanted.template}' not found: an image has a name, and no path of this server", 404
        )
    env = wanted.template if "@" in wanted.template and build is None else None
    image = "host" if wanted.template == BASE else build.image if build is not None else wanted.template
    resources = resources or (build.resources if build is not None else None)
    return CreateInstance(
        env=env,
        image=None if env else image,
        ttl_s=wanted.seconds,
        labels=wanted.metadata,
        environment={**(build.env if build is not None else {}), **wanted.env},
        resources=None if resources == Resources() else resources,
        network="allowlist" if wanted.hosts else "none" if wanted.internet is False else None,
        allowed_hosts=wanted.hosts,
        on_timeout=wanted.on_timeout,
        auto_resume=wanted.auto_resume,
    )


def _template(instance: Instance, build: TemplateBuild | None) -> str:
    if instance.env or instance.plan.image == "host":
        return instance.env or BASE
    return build.template if build is not None else instance.plan.image


async def _start(box: E2bSandbox, build: TemplateBuild) -> None:
    """A sandbox whose template's own program does not come up is refused and removed."""
    await box.accounts.prepare()
    try:
        await run_start(box, build)
    except E2bRefusal as error:
        raise PlaneUnavailable(error.message) from error


async def _remove_image(backend: Backend, image: str) -> None:
    """Remove an image that no template uses, from wherever the backend keeps it."""
    images = getattr(backend, "images", None)
    try:
        if isinstance(backend, OwnImages):
            await backend.remove_image(image)
        elif isinstance(images, ImageStore):
            await images.remove(image)
    except UnknownName:
        return
