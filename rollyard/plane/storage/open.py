"""Where a control plane keeps its records, by URL: a SQL store, which holds runs too, or Redis, which does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from rollyard.plane.storage.redis import RedisPlane, open_redis
from rollyard.plane.storage.sql.store import SqlPlane
from rollyard.store.store import Store


class Opened(NamedTuple):
    records: SqlPlane | RedisPlane
    runs: Store | None  # None on Redis


@asynccontextmanager
async def open_plane(where: str) -> AsyncGenerator[Opened]:
    """A path, `sqlite:///path`, `postgresql://...`, or `redis://...`."""
    if where.startswith(("redis://", "rediss://")):
        async with open_redis(where) as records:
            yield Opened(records, None)
        return
    async with Store.open(where, private=True) as store:
        yield Opened(SqlPlane(store.database), store)
