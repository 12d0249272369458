"""`BackendEngine`: every sandbox backend as an engine."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Self

import msgspec

from rollyard.core.errors import SandboxGone
from rollyard.core.plane import Instance
from rollyard.core.protocols import Backend, ByteStream, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.plane.engines.protocol import INSTANCE_LABEL, PLANE_LABEL, START_JOB, EngineCapabilities, EngineEntry

_STEP_S = 60.0


class BackendEngine:
    """Any sandbox backend. Sandboxes it opened or attached to are kept at hand until they are deleted."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.backend = backend
        self._held: dict[str, Sandbox] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        can = self.backend.capabilities
        return EngineCapabilities(
            **msgspec.structs.asdict(can), presign=can.dial, exec=True, files=True, arguments=True
        )

    async def create(self, instance: Instance, plane: str) -> str:
        plan, can = instance.plan, self.backend.capabilities
        spec = SandboxSpec(
            image=plan.image,
            env=plan.env,
            mounts=plan.mounts,
            resources=plan.resources,
            network=plan.network,
            allowed_hosts=plan.allowed_hosts,
            ttl_s=min(plan.engine_ttl_s(plan.ttl_s), can.max_ttl_s or math.inf),
            labels={PLANE_LABEL: plane, INSTANCE_LABEL: instance.id},
            lifetime="ttl" if can.lifetime_ttl else "owner",
        )
        sandbox: Sandbox = await self.backend.open(spec)
        self._held[sandbox.id] = sandbox
        if plan.start:
            try:
                await sandbox.start([*plan.start, *plan.arguments], job_id=START_JOB)
            except BaseException:  # cancelled too: nobody was told its name, so nobody else would delete it
                await asyncio.shield(asyncio.ensure_future(self.delete(sandbox.id)))
                raise
        return sandbox.id

    async def sandbox(self, ref: str) -> Sandbox:
        held = self._held.get(ref)
        if held is None:
            async with asyncio.timeout(_STEP_S):
                held = self._held[ref] = await self.backend.attach(ref)
        return held

    async def dial(self, ref: str, port: int) -> ByteStream:
        async with asyncio.timeout(_STEP_S):
            return await (await self.sandbox(ref)).dial(port)

    async def alive(self, ref: str) -> bool:
        try:
            async with asyncio.timeout(_STEP_S):
                return await (await self.sandbox(ref)).alive()
        except SandboxGone:
            return False

    async def delete(self, ref: str) -> None:
        try:
            async with asyncio.timeout(_STEP_S):
                await (await self.sandbox(ref)).kill()
        except SandboxGone:
            pass
        self._held.pop(ref, None)

    async def extend(self, ref: str, ttl_s: float) -> None:
        async with asyncio.timeout(_STEP_S):
            await (await self.sandbox(ref)).extend(min(ttl_s, self.backend.capabilities.max_ttl_s or math.inf))

    async def list(self, plane: str) -> list[EngineEntry]:
        async with asyncio.timeout(_STEP_S):
            found = await self.backend.list({PLANE_LABEL: plane})
        return [EngineEntry(ref=info.id, instance_id=info.labels.get(INSTANCE_LABEL, "")) for info in found]

    async def __aenter__(self) -> Self:
        await self.backend.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()
        await self.backend.__aexit__(kind, error, trace)
