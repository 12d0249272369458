"""A change to records in Redis: rows are read, the change is worked out here, and all of it is written or nothing.

Every row is a hash with a revision. A change remembers the revisions it read, and one Lua script compares them and writes; when
another writer was first, the change is worked out again. WATCH and MULTI are not used, so servers that refuse them will do.

Where scripts are refused as well, a change takes a lock that expires, writes down what it is about to do, does it and crosses
it out; the next one to take the lock finishes what a dead writer began. Everything written is absolute, so doing it twice does no
harm. What that gives up: writers of all replicas go one at a time, readers may see a change half done, and a writer that stalls
for longer than its lock lasts, between its last look at the clock and its last write, may overwrite a newer change.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollyard.core.errors import StoreError
from rollyard.core.log import Log

T = TypeVar("T")
Row = dict[str, str]
Command = list[str]
_log = Log("rollyard.store")
_REV = "_rev"
DEADLINE_S = 60.0
LOCK_S = 10.0
COMMIT = """
local reads = tonumber(ARGV[1])
for n = 1, reads do
  if (redis.call('HGET', KEYS[n], '_rev') or '0') ~= ARGV[n + 1] then return 0 end
end
local at = reads + 2
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
return 1
"""


class Change:
    """The rows as this change sees them, its own writes included."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._read: dict[str, tuple[int, Row]] = {}
        self._new: dict[str, Row | None] = {}
        self._indexes: list[Command] = []

    async def rows(self, keys: Sequence[str]) -> list[Row]:
        """Each row's fields; {} for one that is not there."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._read]
        if missing:
            pipe = self._client.pipeline(transaction=False)
            for key in missing:
                pipe.hgetall(key)
            for key, found in zip(missing, await pipe.execute(), strict=True):
                self._read[key] = decode_row(found)
        return [dict(self._new[key] or {}) if key in self._new else dict(self._read[key][1]) for key in keys]

    async def row(self, key: str) -> Row:
        return (await self.rows([key]))[0]

    def put(self, key: str, row: Row) -> int:
        """Replace a row that was read; gives its new revision."""
        self._new[key] = row
        return self._read[key][0] + 1

    def drop(self, key: str) -> None:
        self._new[key] = None

    def add(self, index: str, member: str, score: float = 0.0) -> None:
        self._indexes.append(["ZADD", index, repr(score), member])

    def remove(self, index: str, member: str) -> None:
        self._indexes.append(["ZREM", index, member])

    def note(self, key: str, field: str, value: str) -> None:
        """One line of a hash that only grows, and is not read in changes."""
        self._indexes.append(["HSET", key, field, value])

    @property
    def revisions(self) -> dict[str, int]:
        return {key: revision for key, (revision, _) in self._read.items()}

    @property
    def commands(self) -> list[Command]:
        made: list[Command] = []
        for key, row in self._new.items():
            revision, old = self._read[key]
            if row is None:
                made.append(["DEL", key])
                continue
            gone = [field for field in old if field not in row]
            made.append(["HSET", key, _REV, str(revision + 1), *(word for pair in row.items() for word in pair)])
            if gone:
                made.append(["HDEL", key, *gone])
        return made + self._indexes


class Changer:
    """Makes changes, one at a time in this process and against all others. `scripted` says whether the server runs scripts."""

    def __init__(self, client: Any, prefix: str, *, scripted: bool) -> None:
        self._client, self.scripted = client, scripted
        self._lock, self._journal = f"{prefix}lock", f"{prefix}journal"
        self._commit = client.register_script(COMMIT)
        self._turn = asyncio.Lock()

    async def __call__(self, work: Callable[[Change], Awaitable[T]]) -> T:
        """`work` may run several times; it does nothing but read and write through the change."""
        async with asyncio.timeout(DEADLINE_S), self._turn:
            while True:
                change = Change(self._client)
                result = await work(change)
                if not change.commands or await (self._by_script if self.scripted else self._by_lock)(change):
                    return result
                await asyncio.sleep(random.uniform(0.0, 0.005))

    async def _by_script(self, change: Change) -> bool:
        revisions, commands = change.revisions, change.commands
        words = [str(len(revisions)), *map(str, revisions.values())]
        for command in commands:
            words += [str(len(command)), *command]
        keys = [*revisions, *dict.fromkeys(command[1] for command in commands)]
        return bool(await self._commit(keys=keys, args=words))

    async def _by_lock(self, change: Change) -> bool:
        token = secrets.token_hex(16)
        until = await self._take_lock(token)
        try:
            await self._finish_what_was_begun()
            pipe = self._client.pipeline(transaction=False)
            for key in change.revisions:
                pipe.hget(key, _REV)
            if [int(found or 0) for found in await pipe.execute()] != list(change.revisions.values()):
                return False
            await self._client.set(self._journal, msgspec.json.encode(change.commands))
            if time.monotonic() > until:
                raise StoreError("a change took longer than its lock lasts; the next one finishes it")
            await self._apply(change.commands)
        finally:
            if await self._client.get(self._lock) == token.encode():
                await self._client.delete(self._lock)
        return True

    async def _take_lock(self, token: str) -> float:
        """When half of the lock's time is over."""
        while True:
            if await self._client.set(self._lock, token, nx=True, px=int(LOCK_S * 1000)):
                return time.monotonic() + LOCK_S / 2
            await asyncio.sleep(random.uniform(0.001, 0.01))

    async def _finish_what_was_begun(self) -> None:
        begun = await self._client.get(self._journal)
        if begun is not None:
            _log.warning("finishing a change that another writer began")
            await self._apply(msgspec.json.decode(begun, type=list[Command]))

    async def _apply(self, commands: list[Command]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        pipe.delete(self._journal)
        await pipe.execute()


def decode_row(found: dict[bytes, bytes]) -> tuple[int, Row]:
    """A row's revision, and the row."""
    row = {name.decode(): value.decode() for name, value in found.items()}
    return int(row.pop(_REV, "0")), row
