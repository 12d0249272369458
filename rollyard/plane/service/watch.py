"""Watching instances: what has changed since a place, by long poll or as a stream.

Changes are found by their time, and looked for a few seconds back as well, since a change is written a moment after the time it
bears; what was told already is remembered and not told again. So every change that lasts is told at least once, and what is told
is always the newest state, never one that was skipped over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import PlaneInvalid
from rollyard.core.plane import Instance
from rollyard.plane.service.cursors import read_cursor, write_cursor
from rollyard.plane.service.shapes import instance_json
from rollyard.plane.storage.protocol import PlaneStore

OVERLAP_S = 5.0
POLL_S = 0.25
BEAT_S = 15.0
_PAGE = 500
_REMEMBERED = 200  # in a cursor; beyond it a change may be told twice


class Watcher:
    """One caller's place among the changes. `owner` None sees everybody's."""

    def __init__(self, store: PlaneStore, owner: str | None, cursor: str | None, now: float) -> None:
        self._store, self._owner = store, owner
        self._since, self._told = now, dict[str, float]()
        keys = read_cursor(cursor, 2)
        if keys is not None:
            try:
                self._since = float(keys[0])
                self._told = msgspec.json.decode(keys[1], type=dict[str, float])
            except (*BAD_JSON, ValueError) as error:
                raise PlaneInvalid("this cursor is not one of a watch's", hint="start again without one") from error

    @property
    def cursor(self) -> str:
        newest = dict(list(self._told.items())[-_REMEMBERED:])
        return write_cursor(repr(self._since), msgspec.json.encode(newest).decode())

    def note(self, instances: Iterable[Instance]) -> None:
        """The caller knows these as they are."""
        self._told |= {one.id: one.updated_at for one in instances}

    async def news(self) -> list[Instance]:
        """What changed and was not told yet, oldest first."""
        fresh: list[Instance] = []
        since = self._since - OVERLAP_S
        while True:
            found = await self._store.list_changed(owner=self._owner, since=since, limit=_PAGE)
            fresh += [one for one in found if self._told.get(one.id) != one.updated_at]
            self._told |= {one.id: one.updated_at for one in found}
            if len(found) < _PAGE or found[-1].updated_at == since:
                break
            since = found[-1].updated_at
        if fresh:
            self._since = max(self._since, fresh[-1].updated_at)
        self._told = {name: at for name, at in self._told.items() if at >= self._since - OVERLAP_S}
        newest = {one.id: one for one in fresh}
        return list(newest.values())

    async def wait(self, wait_s: float, over: asyncio.Event) -> list[Instance]:
        """The first news, or [] when `wait_s` seconds have passed or the server stops."""
        ends = time.monotonic() + wait_s
        while True:
            found = await self.news()
            if found or over.is_set() or time.monotonic() >= ends:
                return found
            await asyncio.sleep(min(POLL_S, max(0.0, ends - time.monotonic())))


async def events(
    watcher: Watcher, first: list[Instance], over: asyncio.Event, *, beat_s: float = BEAT_S
) -> AsyncGenerator[bytes]:
    """Server-sent events: what there is, then what changes. The id of an event is the cursor to come back with."""
    for instance in first:
        yield _event(instance, watcher.cursor)
    yield b"event: current\ndata: {}\n\n"
    while not over.is_set():
        found = await watcher.wait(beat_s, over)
        for instance in found:
            yield _event(instance, watcher.cursor)
        if not found:
            yield b": \n\n"


def _event(instance: Instance, cursor: str) -> bytes:
    return b"id: %s\nevent: instance\ndata: %s\n\n" % (cursor.encode(), msgspec.json.encode(instance_json(instance)))


async def until_not(
    read: Callable[[], Awaitable[Instance]], state: str, wait_s: float, over: asyncio.Event
) -> Instance:
    """One instance, as soon as it is not in `state` any more, or when the time is over."""
    ends = time.monotonic() + wait_s
    while True:
        found = await read()
        if found.state != state or over.is_set() or time.monotonic() >= ends:
            return found
        await asyncio.sleep(min(POLL_S, max(0.0, ends - time.monotonic())))
