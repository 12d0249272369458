"""The control plane's records as tables for people, on Redis: all rows are read, then searched and sorted here. Reads only.

Redis keeps no list of owners: those who have a key or ever had an instance are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rollyard.core.plane import EnvRecord, Instance, OwnerUsage
from rollyard.core.plane_tables import TableQuery

if TYPE_CHECKING:
    from rollyard.plane.storage.redis.store import RedisPlane

T = TypeVar("T", bound=msgspec.Struct)
_PAGE = 500


async def instances(plane: RedisPlane, look: TableQuery) -> tuple[list[Instance], int]:
    """The rows wanted, and how many there are in all."""
    found = [one async for one in _instances(plane)]
    return _page(found, look, lambda one: (one.id, one.owner, one.env, one.run_id, str(one.labels)), "id")


async def envs(plane: RedisPlane, look: TableQuery) -> tuple[list[EnvRecord], int]:
    found, after = list[EnvRecord](), None
    while page := await plane.list_envs(words=(), status=None, after=after, limit=_PAGE):
        found += page
        after = (page[-1].name, page[-1].version)
    return _page(found, look, lambda one: (one.id, one.spec.description, *one.spec.tags), "name")


async def owners(plane: RedisPlane, look: TableQuery) -> tuple[list[OwnerUsage], int]:
    names = {one.owner async for one in _instances(plane)} | {key.owner for key in await plane.list_keys()}
    return _page([await plane.usage(name) for name in sorted(names)], look, lambda one: (one.owner,), "owner")


async def count_states(plane: RedisPlane) -> dict[tuple[str, str], int]:
    return dict(Counter([(one.engine, one.state) async for one in _instances(plane)]))


async def _instances(plane: RedisPlane) -> AsyncGenerator[Instance]:
    after = ""
    while page := await plane.list_instances(
        owner=None, env=None, run_id=None, rollout_id=None, live=None, labels={}, after=after, limit=_PAGE
    ):
        for one in page:
            yield one
        after = page[-1].id


def _page(
    found: Sequence[T], look: TableQuery, words: Callable[[T], tuple[str | None, ...]], last: str
) -> tuple[list[T], int]:
    def matches(one: T) -> bool:
        texts = words(one)
        same = all(getattr(one, name) == value for name, value in look.same.items())
        return same and (not look.search or any(look.search.lower() in (text or "").lower() for text in texts))

    chosen = sorted((one for one in found if matches(one)), key=lambda one: getattr(one, last))
    known = [one for one in chosen if getattr(one, look.sort) is not None]
    known.sort(key=lambda one: getattr(one, look.sort), reverse=look.descending)
    chosen = [*known, *(one for one in chosen if getattr(one, look.sort) is None)]
    return chosen[look.offset : look.offset + look.limit], len(chosen)
