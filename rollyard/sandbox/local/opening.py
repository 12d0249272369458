"""What `Backend.open` returns: awaited, it is a sandbox the caller closes; entered, one that is closed on the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any

import anyio

from rollyard.sandbox.local.box import LocalSandbox

_CLOSE_S = 15.0


class LocalOpening:
    def __init__(self, make: Callable[[], Awaitable[LocalSandbox]]) -> None:
        self._make = make
        self._box: LocalSandbox | None = None

    def __await__(self) -> Generator[Any, None, LocalSandbox]:
        return self._make().__await__()

    async def __aenter__(self) -> LocalSandbox:
        self._box = await self._make()
        return self._box

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is not None:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await self._box.kill()
