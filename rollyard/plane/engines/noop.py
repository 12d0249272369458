"""`NoopEngine`: makes nothing, for tests and measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rollyard.core.errors import PlaneUnsupported
from rollyard.core.ids import new_id
from rollyard.core.plane import Instance
from rollyard.core.protocols import ByteStream, Sandbox
from rollyard.plane.engines.protocol import EngineCapabilities, EngineEntry


class NoopEngine:
    """Makes nothing and remembers it: for tests and for measuring the plane alone. Time is the clock's it was given."""

    name = "noop"

    def __init__(self, *, clock: Callable[[], float] = time.time, can_list: bool = True) -> None:
        self._clock = clock
        self._can_list = can_list
        self.things: dict[str, tuple[str, str, float]] = {}  # ref -> plane, instance, end of its time

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(list=self._can_list, ttl=True, extend=True, images=True, network_none=True)

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

    async def list(self, plane: str) -> list[EngineEntry]:
        if not self._can_list:
            raise PlaneUnsupported("noop was told that it cannot list")
        return [EngineEntry(ref=ref, instance_id=thing[1]) for ref, thing in self.things.items() if thing[0] == plane]

    async def sandbox(self, ref: str) -> Sandbox:
        raise PlaneUnsupported("noop runs nothing", hint="create the instance on an engine that can exec")

    async def dial(self, ref: str, port: int) -> ByteStream:
        raise PlaneUnsupported("noop has no ports", hint="create the instance on an engine that can dial")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None
