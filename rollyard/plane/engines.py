"""Engines: what makes instances. `BackendEngine` turns every sandbox backend into one; `NoopEngine` makes nothing.

An engine is asked only for what its `abilities` say; the plane refuses the rest with 501 before anything happens. An engine
that cannot list is no special case for anybody but the sweep. Everything an engine makes bears the instance's id, so that
what a crash left behind is found again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import msgspec

from rollyard.core.errors import ConfigError, PlaneUnsupported, SandboxGone, UnknownName
from rollyard.core.ids import new_id
from rollyard.core.plane import Instance
from rollyard.core.protocols import Backend, ByteStream, Sandbox
from rollyard.core.registry import load, names
from rollyard.core.sandbox import SandboxSpec

PLANE_LABEL = "rollyard.plane"
INSTANCE_LABEL = "rollyard.instance"
START_JOB = "start"  # the job in a sandbox that runs the environment's own program
_STEP_S = 60.0


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the capability map. `ttl`: what was made ends by itself after its time, whoever has died. `dial`: the
    plane itself can reach a port inside, so its gateway passes; `presign`: a URL to a port can be given, by the plane where
    it can dial and by the engine otherwise."""

    list: bool = False
    dial: bool = False
    presign: bool = False
    exec: bool = False
    files: bool = False
    pause: bool = False
    snapshot: bool = False
    ttl: bool = False
    extend: bool = False
    mounts: bool = False
    arguments: bool = False
    images: bool = False
    network_none: bool = True
    network_allowlist: bool = False
    accelerators: bool = False
    max_concurrent: int | None = None


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an engine's list: its own name for a thing, and the instance that the thing is for."""

    ref: str
    instance_id: str


class Engine(Protocol):
    name: str

    @property
    def abilities(self) -> Abilities: ...
    async def create(self, instance: Instance, plane: str) -> str:
        """Make it, bearing the instance's id and the plane's name; gives the engine's own name for it. Raises
        `PlaneInvalid` or `PlaneUnsupported` only where nothing was made."""
        ...

    async def alive(self, ref: str) -> bool: ...
    async def delete(self, ref: str) -> None:
        """Returns once it is gone; one that is gone already is no error."""
        ...

    async def list(self, plane: str) -> list[Made]: ...
    async def extend(self, ref: str, ttl_s: float) -> None: ...
    async def sandbox(self, ref: str) -> Sandbox: ...
    async def dial(self, ref: str, port: int) -> ByteStream:
        """Connect to a port inside, where `abilities.dial` says so."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class PresigningEngine(Protocol):
    """An engine that gives expiring URLs to ports itself, where the plane cannot dial."""

    async def presign(self, ref: str, port: int, minutes: float) -> str: ...


class BackendEngine:
    """Any sandbox backend. Sandboxes it opened or attached to are kept at hand until they are deleted."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.backend = backend
        self._held: dict[str, Sandbox] = {}

    @property
    def abilities(self) -> Abilities:
        can = self.backend.capabilities
        return Abilities(
            list=can.list,
            dial=can.dial,
            presign=can.dial,
            exec=True,
            files=True,
            pause=can.pause,
            snapshot=can.snapshot,
            arguments=True,
            ttl=can.ttl,
            extend=can.extend,
            mounts=can.mounts,
            images=can.images,
            network_none=can.network_none,
            network_allowlist=False,
            max_concurrent=can.max_concurrent,
        )

    async def create(self, instance: Instance, plane: str) -> str:
        plan, can = instance.plan, self.backend.capabilities
        spec = SandboxSpec(
            image=plan.image,
            env=plan.env,
            mounts=plan.mounts,
            resources=plan.resources,
            network=plan.network,
            ttl_s=plan.ttl_s,
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
            await (await self.sandbox(ref)).extend(ttl_s)

    async def list(self, plane: str) -> list[Made]:
        async with asyncio.timeout(_STEP_S):
            found = await self.backend.list({PLANE_LABEL: plane})
        return [Made(ref=info.id, instance_id=info.labels.get(INSTANCE_LABEL, "")) for info in found]

    async def __aenter__(self) -> Self:
        await self.backend.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()
        await self.backend.__aexit__(kind, error, trace)


class NoopEngine:
    """Makes nothing and remembers it: for tests and for measuring the plane alone. Time is the clock's it was given."""

    name = "noop"

    def __init__(self, *, clock: Callable[[], float] = time.time, can_list: bool = True) -> None:
        self._clock = clock
        self._can_list = can_list
        self.things: dict[str, tuple[str, str, float]] = {}  # ref -> plane, instance, end of its time

    @property
    def abilities(self) -> Abilities:
        return Abilities(list=self._can_list, ttl=True, extend=True, images=True)

    async def create(self, instance: Instance, plane: str) -> str:
        ref = new_id("noop")
        self.things[ref] = (plane, instance.id, self._clock() + instance.plan.ttl_s)
        return ref

    async def alive(self, ref: str) -> bool:
        return ref in self.things and self.things[ref][2] > self._clock()

    async def delete(self, ref: str) -> None:
        self.things.pop(ref, None)

    async def extend(self, ref: str, ttl_s: float) -> None:
        plane, instance_id, _ = self.things[ref]
        self.things[ref] = (plane, instance_id, self._clock() + ttl_s)

    async def list(self, plane: str) -> list[Made]:
        if not self._can_list:
            raise PlaneUnsupported("noop was told that it cannot list")
        return [Made(ref=ref, instance_id=thing[1]) for ref, thing in self.things.items() if thing[0] == plane]

    async def sandbox(self, ref: str) -> Sandbox:
        raise PlaneUnsupported("noop runs nothing", hint="create the instance on an engine that can exec")

    async def dial(self, ref: str, port: int) -> ByteStream:
        raise PlaneUnsupported("noop has no ports", hint="create the instance on an engine that can dial")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def engine(text: str, **options: Any) -> Engine:
    """`noop`, an engine by entry point, or a sandbox backend by its name. `name=URL` says where the engine's service is; for
    `remote`, another plane, it is also written `remote:URL`."""
    name, separator, url = text.partition(":" if text.startswith("remote:") else "=")
    if separator:
        options["url"] = url
    if name == "noop":
        return NoopEngine(**options)
    if name in names("rollyard.engines"):
        return load("rollyard.engines", name)(**options)
    if name in names("rollyard.sandboxes"):
        return BackendEngine(load("rollyard.sandboxes", name)(**options))
    raise UnknownName("engine", name, ["noop", *names("rollyard.engines"), *names("rollyard.sandboxes")])


def choose(engines: Mapping[str, Engine], name: str | None) -> Engine:
    """The engine of this name; the first one where none is asked for."""
    if name is None:
        if not engines:
            raise ConfigError("this plane has no engine")
        return next(iter(engines.values()))
    if name not in engines:
        raise UnknownName("engine", name, list(engines))
    return engines[name]


def refuse(engine: Engine, engines: Mapping[str, Engine], ability: str, what: str) -> PlaneUnsupported:
    """The refusal that names who can."""
    able = [name for name, other in engines.items() if getattr(other.abilities, ability)]
    hint = f"engines here that can: {', '.join(able)}" if able else "no engine of this server can; see /v1/engines"
    return PlaneUnsupported(f"engine {engine.name} cannot {what}", hint=hint)
