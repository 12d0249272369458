"""A change to records in Redis: rows are read, the change is worked out here, and all of it is written or nothing.

Every row is a hash with a revision. A change remembers the revisions it read, and one Lua script compares them and writes; when
another writer was first, the change is worked out again. WATCH and MULTI are not used, so servers that refuse them will do;
one that refuses scripts will not (`open_redis` says so): without them a writer that stalls can overwrite a newer change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rollyard.core.log import Log

T = TypeVar("T")
Row = dict[str, str]
Command = list[str]
_log = Log("rollyard.store")
_REV = "_rev"
DEADLINE_S = 60.0
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
    """Makes changes, one at a time in this process and against all others."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._commit = client.register_script(COMMIT)
        self._turn = asyncio.Lock()

    async def __call__(self, work: Callable[[Change], Awaitable[T]]) -> T:
        """`work` may run several times; it does nothing but read and write through the change."""
        async with asyncio.timeout(DEADLINE_S), self._turn:
            while True:
                change = Change(self._client)
                result = await work(change)
                if not change.commands or await self._write(change):
                    return result
                await asyncio.sleep(random.uniform(0.0, 0.005))

    async def _write(self, change: Change) -> bool:
        revisions, commands = change.revisions, change.commands
        words = [str(len(revisions)), *map(str, revisions.values())]
        for command in commands:
            words += [str(len(command)), *command]
        keys = [*revisions, *dict.fromkeys(command[1] for command in commands)]
        return bool(await self._commit(keys=keys, args=words))


def decode_row(found: dict[bytes, bytes]) -> tuple[int, Row]:
    """A row's revision, and the row."""
    row = {name.decode(): value.decode() for name, value in found.items()}
    return int(row.pop(_REV, "0")), row
