"""`Engine`: what makes instances, and `EngineCapabilities`: what each can.

An engine is asked only for what its `capabilities` say; the plane refuses the rest with 501 before anything happens. An engine
that cannot list is a special case for the sweep alone. Everything an engine makes bears the instance's id, so that
what a crash left behind is found again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import msgspec

from rollyard.core.plane import Instance
from rollyard.core.protocols import ByteStream, Sandbox
from rollyard.core.sandbox import Capabilities, Isolation

PLANE_LABEL = "rollyard.plane"
INSTANCE_LABEL = "rollyard.instance"
START_JOB = "start"  # the job in a sandbox that runs the environment's own program


class EngineCapabilities(Capabilities, frozen=True, kw_only=True):
    """One line of the capability map: a sandbox backend's capabilities, and those in which engines differ. `dial`: the plane
    itself can reach a port inside, so its gateway passes; `presign`: a URL to a port can be given, by the plane where it can
    dial and by the engine otherwise. An engine that does not say how it isolates has `none`, the least."""

    isolation: Isolation = "none"
    presign: bool = False
    exec: bool = False
    files: bool = False
    arguments: bool = False


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an engine's list: its own name for a thing, and the instance that the thing is for."""

    ref: str
    instance_id: str


class Engine(Protocol):
    name: str

    @property
    def capabilities(self) -> EngineCapabilities: ...
    async def create(self, instance: Instance, plane: str) -> str:
        """Make it, bearing the instance's id and the plane's name; gives the engine's own name for it. Raises
        `PlaneInvalid` or `PlaneUnsupported` only where nothing was made."""
        ...

    async def alive(self, ref: str) -> bool: ...
    async def delete(self, ref: str) -> None:
        """Returns once it is gone; one that is gone already is no error."""
        ...

    async def list(self, plane: str) -> list[EngineEntry]: ...
    async def extend(self, ref: str, ttl_s: float) -> None: ...
    async def sandbox(self, ref: str) -> Sandbox: ...
    async def dial(self, ref: str, port: int) -> ByteStream:
        """Connect to a port inside, where `capabilities.dial` says so."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class PresigningEngine(Protocol):
    """An engine that gives expiring URLs to ports itself, where the plane cannot dial."""

    async def presign(self, ref: str, port: int, minutes: float) -> str: ...
