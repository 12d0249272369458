"""`RedisRows`: rows of the plane read and changed in Redis, with the server's errors as `StoreError`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollyard.core.errors import StoreError
from rollyard.plane.storage.redis.change import Change, Changer, Row, decode_row
from rollyard.plane.storage.redis.rows import Keys

T = TypeVar("T")


class RedisRows:
    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._keys, self._changer = client, Keys(prefix), Changer(client)

    async def now(self) -> float:
        """A user without the right `+time` leaves it to this machine."""
        from redis.exceptions import NoPermissionError, RedisError

        try:
            seconds, parts = await self._client.time()
        except NoPermissionError:
            return time.time()
        except RedisError as error:
            raise StoreError(f"Redis: {error}") from error
        return seconds + parts / 1e6

    async def _change(self, work: Callable[[Change], Awaitable[T]]) -> T:
        from redis.exceptions import RedisError

        try:
            return await self._changer(work)
        except RedisError as error:
            raise StoreError(f"Redis: {error}") from error

    async def _row(self, key: str) -> Row:
        return (await self._read_rows([key]))[0]

    async def _read_rows(self, keys: list[str]) -> list[Row]:
        from redis.exceptions import RedisError

        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
        try:
            return [decode_row(found)[1] for found in await pipe.execute()] if keys else []
        except RedisError as error:
            raise StoreError(f"Redis: {error}") from error

    async def _list_after(self, index: str, after: str | None, limit: int) -> list[str]:
        """Members of an index past one, in order."""
        low = b"-" if not after else b"(" + after.encode()
        found = await self._client.zrangebylex(index, low, b"+", 0, limit)
        return [member.decode() for member in found]
