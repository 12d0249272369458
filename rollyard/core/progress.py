"""`Progress`: how work that takes long says how far it is, to any listener."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol


class Progress(Protocol):
    """`done` only grows; `total` is None where it is not known; `message` is for people."""

    def __call__(self, done: float, total: float | None = None, message: str | None = None) -> Awaitable[None]: ...


async def ignore_progress(done: float, total: float | None = None, message: str | None = None) -> None:
    """Progress without a listener."""
