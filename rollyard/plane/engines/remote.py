"""`remote:URL`: an engine that is another plane. Planes federate: hosts with sandboxes run one each, and one in front of them
keeps the owners, quotas and times of all.

What the other plane can do, whether it answers and how much of its quota is left is known before a create is sent, and looked
at again when that is older than a few seconds: a full or silent plane is refused here, at once and by name. Creating names the
instance's id as its idempotency key, so a create whose answer was lost is asked again and makes nothing twice.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import msgspec

from rollyard.core.errors import (
    ConfigError,
    PlaneError,
    PlaneGone,
    PlaneNotFound,
    PlaneQuota,
    PlaneUnavailable,
    PlaneUnsupported,
    SandboxGone,
)
from rollyard.core.plane import Instance
from rollyard.core.program import Program, ProgramCalls
from rollyard.core.protocols import ByteStream, Job, Sandbox
from rollyard.core.sandbox import Exit
from rollyard.plane.client.plane import Plane
from rollyard.plane.engines.protocol import INSTANCE_LABEL, PLANE_LABEL, EngineCapabilities, EngineEntry

KEY_VARIABLE = "ROLLYARD_REMOTE_KEY"
FRESH_S = 3.0  # how old a look at the other plane may be when a create is sent
_LOOK_S = 5.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The other plane as it was last seen. `left` None: it has no bound for this key."""

    at: float
    left: int | None


class RemoteEngine:
    """`engine` is the one to use over there; None is its first. The key is an operator's or a trainer's of that plane."""

    def __init__(self, *, url: str, key: str = "", engine: str | None = None) -> None:
        key = key or os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ConfigError(f"the plane at {url} wants a key", hint=f"set {KEY_VARIABLE}")
        self._url, self._engine = url, engine
        self._plane = Plane(url, key)
        self.name = f"remote:{urlsplit(url).netloc}"
        self.capabilities = EngineCapabilities()
        self._seen: Capacity | None = None
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self.capabilities = await self._capabilities()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._plane.aclose()

    async def _capabilities(self) -> EngineCapabilities:
        """What the engine over there can, less what does not pass through a plane."""
        engines = await self._plane.engines()
        chosen = self._engine or next(iter(engines), None)
        if chosen is None or chosen not in engines:
            raise ConfigError(f"the plane at {self._url} has no engine {chosen!r}; it has {', '.join(engines)}")
        can = msgspec.convert(engines[chosen], EngineCapabilities, strict=False)
        return msgspec.structs.replace(can, list=True, dial=False, pause=False, snapshot=False)

    async def capacity(self) -> Capacity:
        """How the other plane is, no older than a few seconds. Raises `PlaneUnavailable` when it does not answer."""
        async with self._looking:
            if self._seen is None or time.monotonic() - self._seen.at > FRESH_S:
                self._seen = None
                health = await self._plane.json("GET", "/health", timeout_s=_LOOK_S)
                if health.get("status") != "ok":
                    raise PlaneUnavailable(f"the plane at {self._url} is not well: {health.get('status')}")
                usage = await self._plane.json("GET", "/v1/usage", timeout_s=_LOOK_S)
                most, used = usage.get("limit"), usage.get("used")
                left = most - used if isinstance(most, int) and isinstance(used, int) else None
                self._seen = Capacity(at=time.monotonic(), left=left)
            return self._seen

    async def create(self, instance: Instance, plane: str) -> str:
        seen = await self.capacity()
        if seen.left is not None and seen.left <= 0:
            raise PlaneQuota(
                f"the plane at {self._url} is full", hint="create it on another engine, or delete some there"
            )
        plan = instance.plan
        wanted: dict[str, Any] = {
            "image": plan.image,
            "engine": self._engine,
            "ttl_s": plan.ttl_s,
            "environment": dict(plan.env),
            "start": plan.start,
            "arguments": plan.arguments,
            "mount_points": plan.mounts,
            "resources": plan.resources,
            "network": plan.network,
            **({"allowed_hosts": plan.allowed_hosts} if plan.allowed_hosts else {}),
            "run_id": instance.run_id,
            "labels": {**instance.labels, PLANE_LABEL: plane, INSTANCE_LABEL: instance.id},
        }
        made = await self._plane.instances.create(idempotency_key=instance.id, **wanted)
        if seen.left is not None:
            self._seen = msgspec.structs.replace(seen, left=seen.left - 1)
        ref = made.get("id")
        if not isinstance(ref, str):
            raise PlaneUnavailable(f"the plane at {self._url} made an instance and did not name it")
        return ref

    async def alive(self, ref: str) -> bool:
        try:
            return bool((await self._plane.instances.get(ref)).get("live"))
        except (PlaneNotFound, PlaneGone):
            return False

    async def delete(self, ref: str) -> None:
        try:
            await self._plane.instances.delete(ref)
        except (PlaneNotFound, PlaneGone):
            return

    async def extend(self, ref: str, ttl_s: float) -> None:
        await self._plane.instances.extend(ref, ttl_s)

    async def list(self, plane: str) -> list[EngineEntry]:
        found: list[EngineEntry] = []
        async for one in self._plane.instances.list(labels={PLANE_LABEL: plane}):
            labels: Any = one.get("labels") or {}
            found.append(EngineEntry(ref=str(one["id"]), instance_id=str(labels.get(INSTANCE_LABEL, ""))))
        return found

    async def sandbox(self, ref: str) -> Sandbox:
        return cast("Sandbox", _RemoteBox(self._plane, ref))

    async def presign(self, ref: str, port: int, minutes: float) -> str:
        return await self._plane.instances.presign(ref, port, minutes=minutes)

    async def dial(self, ref: str, port: int) -> ByteStream:
        raise PlaneUnsupported(
            "ports over there are reached at that plane's own gateway", hint="ask for a URL with presign"
        )


class _RemoteBox(ProgramCalls):
    """What of a sandbox passes through a plane: programs that are waited for, and whole files. All else is refused by name."""

    def __init__(self, plane: Plane, ref: str) -> None:
        self._plane, self.id = plane, ref

    async def _exec(self, program: Program, timeout: float) -> Exit:
        if program.user is not None:
            raise PlaneUnsupported("a program on a remote plane runs as the instance's own user")
        more: dict[str, Any] = {"env": dict(program.env), "cwd": program.cwd}
        if program.input is not None:
            more["stdin"] = program.input
        with _GoneAs(self.id):
            return await self._plane.instances.exec(self.id, program.argv, timeout_s=timeout, **more)

    async def _start(self, program: Program) -> Job:
        raise PlaneUnsupported("a remote plane passes on programs that are waited for, not 'start'")

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        with _GoneAs(self.id):
            return await self._plane.instances.read(self.id, path)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        if mode is not None or user is not None:
            raise PlaneUnsupported("a file on a remote plane has no mode or user of its own")
        with _GoneAs(self.id):
            await self._plane.instances.write(self.id, path, data.encode() if isinstance(data, str) else data)

    async def alive(self) -> bool:
        try:
            return bool((await self._plane.instances.get(self.id)).get("live"))
        except (PlaneNotFound, PlaneGone):
            return False

    async def kill(self) -> bool:
        try:
            await self._plane.instances.delete(self.id)
        except (PlaneNotFound, PlaneGone):
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        raise PlaneUnsupported(f"a remote plane passes on programs and files, not {name!r}")


class _GoneAs:
    """An instance that is gone over there is a sandbox that is gone here."""

    def __init__(self, ref: str) -> None:
        self._ref = ref

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PlaneError) and isinstance(error, PlaneNotFound | PlaneGone):
            raise SandboxGone(f"instance {self._ref} is gone on its own plane") from error
