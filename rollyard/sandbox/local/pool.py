"""Sandboxes opened ahead of demand, all of one spec, handed out at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from rollyard.core.errors import Error, SandboxUnavailable
from rollyard.sandbox.local.box import LocalSandbox

_FAILED_PAUSE_S = 1.0


class SandboxPool:
    """`take` gives a ready sandbox, which is then the caller's to kill; another is opened in its place. Those not taken are
    killed when the pool closes. A sandbox that died while it waited (its TTL runs from its opening) is not handed out."""

    def __init__(self, make: Callable[[], Awaitable[LocalSandbox]], size: int) -> None:
        self._make = make
        self._ready: asyncio.Queue[LocalSandbox] = asyncio.Queue(size)
        self._filling: asyncio.Task[None] | None = None
        self._last: Error | None = None

    @property
    def ready(self) -> int:
        return self._ready.qsize()

    async def __aenter__(self) -> Self:
        self._filling = asyncio.create_task(self._fill(), name="rollyard-pool")
        return self

    async def _fill(self) -> None:
        while True:
            try:
                box = await self._make()
            except Error as error:  # kept for the next caller; the machine may recover
                self._last = error
                await asyncio.sleep(_FAILED_PAUSE_S)
                continue
            self._last = None
            try:
                await self._ready.put(box)
            except asyncio.CancelledError:
                await asyncio.shield(box.kill())
                raise

    async def take(self, timeout: float = 30.0) -> LocalSandbox:
        try:
            async with asyncio.timeout(timeout):
                while True:
                    box = await self._ready.get()
                    if not box.dead:
                        return box
                    await box.kill()
        except TimeoutError:
            raise self._last or SandboxUnavailable(f"the pool had no sandbox ready within {timeout:g} s") from None

    async def __aexit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        while not self._ready.empty():
            await self._ready.get_nowait().kill()
