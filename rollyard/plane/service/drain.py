"""Whether a server takes on new work. Asked to stop, it first says that it is not ready and refuses creations, so that the load
balancer sends requests elsewhere; what is under way is finished, and streams get an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollyard.core.errors import PlaneDraining
from rollyard.plane.engines.protocol import Engine
from rollyard.plane.storage.protocol import PlaneStore

_READ_S = 10.0


class DrainState:
    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    def refuse(self) -> None:
        """Raises `PlaneDraining` once the server stops."""
        if self.stopping.is_set():
            raise PlaneDraining("this server is stopping", hint="ask another replica, or again in a moment")


async def readiness(
    drain: DrainState, store: PlaneStore, engines: Mapping[str, Engine], clock: Callable[[], float]
) -> tuple[bool, dict[str, Any]]:
    """Whether creations are taken, and how much capacity each engine says it has; None where it does not say."""
    answer: dict[str, Any] = {"ready": not drain.stopping.is_set(), "draining": drain.stopping.is_set(), "at": clock()}
    try:
        async with asyncio.timeout(_READ_S):
            counts = await store.counts()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the storage, the answer is that it is
        return False, {**answer, "ready": False, "store": type(error).__name__}
    capacities: dict[str, Any] = {}
    for name, engine in engines.items():
        live = sum(count for (of, _), count in counts.items() if of == name)
        most = engine.capabilities.max_concurrent
        capacities[name] = {"live": live, "max": most, "free": None if most is None else max(0, most - live)}
    full = bool(capacities) and all(one["free"] == 0 for one in capacities.values())
    return answer["ready"] and not full, {
        **answer,
        "ready": answer["ready"] and not full,
        "store": "ok",
        "engines": capacities,
    }
