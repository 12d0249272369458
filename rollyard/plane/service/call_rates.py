"""How often an owner may have something done in its instances: programs, files, ports, pauses and snapshots, through any API.

Creations have a rate of their own, which the store keeps. This one is each server's: it bounds the work that a server does for an
owner, so it is kept where the work is, and costs no request to the store. A request counts once, whatever it takes; deletions and
reading what is known are never refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollyard.core.errors import PlaneRateLimited
from rollyard.plane.service.request_note import CURRENT

_MOST_KNOWN = 10_000


class CallRates:
    """`rate` requests a second for each owner, `burst` of them at once; None is no limit."""

    def __init__(
        self, rate: float | None = None, burst: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._next: dict[str, float] = {}  # when the owner's allowance is whole again

    def charge(self, owner: str) -> None:
        """Raises `PlaneRateLimited`. Work without an outside caller, such as the sweep's, is free."""
        note = CURRENT.get()
        if not self._rate or note is None or note.charged:
            return
        now = self._clock()
        whole = max(self._next.get(owner, now), now)
        wait = whole - now - (self._burst - 1) / self._rate
        if wait > 0:
            raise PlaneRateLimited(
                f"{owner} uses its instances more than {self._rate:g} times a second on this server",
                retry_after=wait,
                hint=f"wait {wait:.3f} s",
            )
        if len(self._next) >= _MOST_KNOWN:
            self._next = {name: at for name, at in self._next.items() if at > now}
        self._next[owner] = whole + 1.0 / self._rate
        note.charged = True
