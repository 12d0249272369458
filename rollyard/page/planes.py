"""The control plane's tables: instances, environments, engines, the sweep, quotas. Reads only, and shows no secret: what an
instance's environment variables hold is left out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, get_args

import msgspec

from rollyard.core.plane_tables import EnvSortKey, InstanceSortKey, OwnerSortKey, PlaneTableRecords, TableQuery
from rollyard.page.query import PageQuery

PAGE = 50
STATES = ("creating", "running", "deleting", "deleted", "expired", "failed")


class ServedEngine(Protocol):
    """What the page shows of an engine."""

    @property
    def capabilities(self) -> msgspec.Struct: ...


class SweepState(Protocol):
    """What the last sweep did, and when."""

    @property
    def last(self) -> msgspec.Struct | None: ...
    @property
    def last_at(self) -> float | None: ...


class PlaneTables:
    """Over a server's own engines and sweep, or over the records alone."""

    def __init__(
        self,
        records: PlaneTableRecords,
        engines: Mapping[str, ServedEngine] | None = None,
        sweeper: SweepState | None = None,
        default_quota: int | None = None,
    ) -> None:
        self._records, self._engines, self._sweeper = records, engines or {}, sweeper
        self._default_quota = default_quota

    async def overview(self) -> dict[str, Any]:
        counts = await self._records.count_states()
        by_state: Counter[str] = Counter()
        for (_, state), count in counts.items():
            by_state[state] += count
        names = sorted({*self._engines, *(engine for engine, _ in counts)})
        engines = [
            {
                "name": name,
                "served": name in self._engines,
                "capabilities": _capabilities(self._engines.get(name)),
                "live": sum(counts.get((name, state), 0) for state in ("creating", "running", "deleting")),
                "failed": counts.get((name, "failed"), 0),
                "all": sum(count for (engine, _), count in counts.items() if engine == name),
            }
            for name in names
        ]
        return {
            "states": {state: by_state[state] for state in STATES},
            "engines": engines,
            "lease": await self._records.sweep_lease(),
            "swept": self._sweeper.last if self._sweeper is not None else None,
            "swept_at": self._sweeper.last_at if self._sweeper is not None else None,
            "now": time.time(),
        }

    async def instances(self, query: PageQuery) -> dict[str, Any]:
        same: dict[str, Any] = {name: query.text(name) for name in ("state", "engine", "owner") if query.text(name)}
        look = _look(query, get_args(InstanceSortKey), "created_at", same, down=True)
        found, total = await self._records.instances_page(look)
        engines = sorted({*self._engines, *(engine for engine, _ in await self._records.count_states())})
        return {"instances": found, "engines": engines, "states": STATES, "now": time.time(), **_page(look, total)}

    async def instance(self, instance_id: str) -> dict[str, Any]:
        found = await self._records.get_instance(instance_id)
        return {"instance": found, "history": await self._records.history(instance_id), "now": time.time()}

    async def hub(self, query: PageQuery) -> dict[str, Any]:
        same: dict[str, Any] = {"status": query.text("status")} if query.text("status") else {}
        look = _look(query, get_args(EnvSortKey), "name", same)
        found, total = await self._records.envs_page(look)
        return {"envs": found, **_page(look, total)}

    async def quotas(self, query: PageQuery) -> dict[str, Any]:
        look = _look(query, get_args(OwnerSortKey), "owner", {})
        found, total = await self._records.owners_page(look)
        return {"owners": found, "default_quota": self._default_quota, **_page(look, total)}


def _capabilities(engine: ServedEngine | None) -> list[str]:
    if engine is None:
        return []
    return [
        name.replace("_", " ") for name, able in msgspec.structs.asdict(engine.capabilities).items() if able is True
    ]


def _look(
    query: PageQuery, keys: tuple[str, ...], default: str, same: dict[str, Any], *, down: bool = False
) -> TableQuery:
    return TableQuery(
        search=query.text("q"),
        same=same,
        sort=query.sort(keys, default),
        descending=query.down(default=down),
        limit=PAGE,
        offset=query.number("offset"),
    )


def _page(look: TableQuery, total: int) -> dict[str, Any]:
    end = look.offset + look.limit
    return {
        "total": total,
        "offset": look.offset,
        "size": PAGE,
        "next": end if end < total else None,
        "sort": look.sort,
        "down": look.descending,
    }
