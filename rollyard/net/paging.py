"""Lists that come a page at a time, with a cursor to go on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def each_page(read: Callable[[str | None], Awaitable[tuple[Sequence[T], str | None]]]) -> AsyncGenerator[T]:
    """Every item of every page: `read(cursor)` gives a page's items and the next cursor, which is empty at the end."""
    cursor: str | None = None
    while True:
        items, cursor = await read(cursor)
        for item in items:
            yield item
        if not cursor:
            return
