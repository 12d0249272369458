"""Opening with patience: how many at once, how many a second, and again when the error's type says that it is safe.

What may be repeated is a property of the error type (`Error.retry`), never of its text, and of the call: one that broke after it
was sent is repeated only where it says `idempotent`. A provider's `retry_after` is honoured. Backends share this; none has a
loop of its own.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
import stamina

from rollyard.core.errors import ConfigError, Error, SandboxUnavailable

T = TypeVar("T")


class OpenLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`opening` is how many opens run at the same time, `live` how many sandboxes may live; None is no limit."""

    attempts: int = 3
    wait_initial_s: float = 0.1
    wait_max_s: float = 5.0
    opening: int = 16
    creates_per_s: float | None = None
    live: int | None = None

    def __post_init__(self) -> None:
        for name in ("attempts", "opening", "creates_per_s", "live", "wait_initial_s", "wait_max_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"open limit {name} must be positive, got {value!r}")


LOOKS = OpenLimits(attempts=5, wait_initial_s=0.2, wait_max_s=3.0)  # for calls that only look, or are named once


def backoff(error: Exception, *, idempotent: bool = False) -> bool | float | datetime.timedelta:
    """For stamina: whether to try again, or how long to wait first."""
    if not isinstance(error, Error) or not (error.retry == "safe" or (idempotent and error.retry == "if_idempotent")):
        return False
    wait = error.retry_after if isinstance(error, SandboxUnavailable) else None
    return True if wait is None else wait


async def retry_open(
    make: Callable[[], Awaitable[T]], limits: OpenLimits, *, timeout: float | None = None, idempotent: bool = False
) -> T:
    """`make()`, again with exponential backoff and jitter while its errors are safe to repeat; with `idempotent` also when
    it broke after it was sent. The last error is raised."""
    async for attempt in stamina.retry_context(
        on=partial(backoff, idempotent=idempotent),
        attempts=limits.attempts,
        timeout=timeout,
        wait_initial=limits.wait_initial_s,
        wait_max=limits.wait_max_s,
    ):
        with attempt:
            return await make()
    raise AssertionError("stamina ends with a result or an error")


class Throttle:
    """Spreads opens out in time and number. Belongs to one event loop."""

    def __init__(self, limits: OpenLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.opening)
        self._next = 0.0

    @asynccontextmanager
    async def place(self, live: int) -> AsyncGenerator[None]:
        """One open's turn. `live` is how many there are now; too many is refused, not waited for."""
        if self._limits.live is not None and live >= self._limits.live:
            raise SandboxUnavailable(
                f"{live} sandboxes live, the limit is {self._limits.live}", hint="close some, or raise the limit"
            )
        async with self._places:
            if self._limits.creates_per_s is not None:
                now = asyncio.get_running_loop().time()
                turn = max(now, self._next)
                self._next = turn + 1 / self._limits.creates_per_s
                await asyncio.sleep(turn - now)
            yield
