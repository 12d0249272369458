"""What a page was asked for: search words, a sort key, an offset. Anything odd in the address falls back to the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request

Key = TypeVar("Key", bound=str)


class PageQuery:
    def __init__(self, query: Mapping[str, str]) -> None:
        self._query = query

    def text(self, name: str) -> str | None:
        """None when it is not there or empty."""
        return self._query.get(name) or None

    def number(self, name: str, default: int = 0) -> int:
        text = self._query.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default

    def sort(self, keys: Sequence[Key], default: Key) -> Key:
        wanted = self._query.get("sort", "")
        return next((key for key in keys if key == wanted), default)

    def down(self, default: bool = False) -> bool:
        return {"1": True, "0": False}.get(self._query.get("down", ""), default)


def read_query(request: Request) -> PageQuery:
    return PageQuery(request.query_params)
