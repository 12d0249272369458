"""The plane's instances as a sandbox backend: what is opened here has a row, an owner, a quota, an end and a history.

Parts that open sandboxes (the Fleet API, verifiers of its tasks, rollouts of its jobs) thereby get instances without knowing it.
Who owns one is read from its labels by `owner`, since a spec has no such field. Only what an instance's plan can carry is taken:
a spec that asks for layers, a user, a directory or options is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import msgspec

from rollyard.core.errors import PlaneGone, PlaneNotFound, SandboxGone, Unsupported
from rollyard.core.plane import Instance
from rollyard.core.protocols import Sandbox
from rollyard.core.sandbox import Capabilities, SandboxInfo, SandboxSpec
from rollyard.core.sandbox_wrapper import SandboxWrapper
from rollyard.plane.engines.backend import BackendEngine
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.instances import Instances
from rollyard.sandbox.pending import PendingSandbox

_PLAIN = ("layers", "workdir", "user", "options", "volumes", "beside", "names")


class InstanceBackend:
    """Over one engine of the plane; entering and leaving it does nothing, since the plane owns the engine."""

    name = "plane"

    def __init__(
        self, instances: Instances, engine: BackendEngine, *, owner: Callable[[Mapping[str, str]], str]
    ) -> None:
        self._instances, self._engine, self._owner = instances, engine, owner

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(
            self._engine.backend.capabilities, layers=False, users=False, services=False, pool=False
        )

    def open(self, spec: SandboxSpec) -> PendingSandbox[Sandbox]:
        plain = SandboxSpec()
        if unsupported := [name for name in _PLAIN if getattr(spec, name) != getattr(plain, name)]:
            raise Unsupported(f"an instance of the plane takes no {', '.join(unsupported)}")
        return PendingSandbox(lambda: self._open(spec))

    async def _open(self, spec: SandboxSpec) -> Sandbox:
        wanted = CreateInstance(
            image=spec.image,
            engine=self._engine.name,
            ttl_s=spec.ttl_s,
            idle_ttl_s=spec.idle_ttl_s,
            labels=dict(spec.labels),
            environment=dict(spec.env),
            mount_points=spec.mounts,
            resources=spec.resources,
            network=spec.network,
            allowed_hosts=spec.allowed_hosts,
        )
        return await self._hold(await self._instances.create(wanted, owner=self._owner(spec.labels)))

    async def _hold(self, instance: Instance) -> Sandbox:
        try:
            sandbox = await self._instances.sandbox(instance.id)
        except (PlaneGone, PlaneNotFound) as error:
            raise SandboxGone(error.message) from error
        return _InstanceSandbox(self._instances, self._info(instance), sandbox)

    async def attach(self, sandbox_id: str) -> Sandbox:
        try:
            return await self._hold(await self._instances.get(sandbox_id))
        except PlaneNotFound as error:
            raise SandboxGone(error.message) from error

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        found = self._instances.all(labels=labels)
        return [self._info(one) async for one in found if one.engine == self._engine.name and one.state == "running"]

    async def reap(self, labels: Mapping[str, str] | None = None, older_than: float | None = None) -> list[str]:
        raise Unsupported("instances are ended by the plane's own sweep")

    def _info(self, instance: Instance) -> SandboxInfo:
        return SandboxInfo(
            id=instance.id,
            backend=self.name,
            image=instance.plan.image,
            isolation=self._engine.backend.capabilities.isolation,
            labels=instance.labels,
            created_at=instance.created_at,
            expires_at=instance.expires_at,
            state=instance.state,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class _InstanceSandbox(SandboxWrapper):
    """The instance's sandbox in everything but its name and its end, which are the plane's."""

    def __init__(self, instances: Instances, info: SandboxInfo, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._instances = instances
        self.id, self.info = info.id, info

    async def extend(self, ttl_s: float) -> None:
        await self._instances.extend(self.id, ttl_s)

    async def pause(self) -> None:
        await self._instances.pause(self.id)

    async def resume(self) -> None:
        await self._instances.resume(self.id)

    async def snapshot(self) -> str:
        return await self._instances.snapshot(self.id)

    async def kill(self) -> bool:
        try:
            await self._instances.delete(self.id)
        except PlaneNotFound:
            return False
        return True
