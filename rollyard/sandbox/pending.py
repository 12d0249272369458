"""What `Backend.open` returns: awaited, it is a sandbox the caller closes; entered, one that is closed on the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

import anyio

from rollyard.core.protocols import Sandbox

S = TypeVar("S", bound=Sandbox)
_CLOSE_S = 15.0


class PendingSandbox(Generic[S]):
    """`make` opens the sandbox. Closing is shielded and bounded."""

    def __init__(self, make: Callable[[], Awaitable[S]], *, close_s: float = _CLOSE_S) -> None:
        self._make, self._close_s = make, close_s
        self._box: S | None = None

    def __await__(self) -> Generator[Any, None, S]:
        return self._make().__await__()

    async def __aenter__(self) -> S:
        self._box = await self._make()
        return self._box

    async def __aexit__(self, *_: object) -> None:
        if self._box is not None:
            with anyio.move_on_after(self._close_s, shield=True):
                await self._box.kill()
