"""How far a worker's event loop is behind, and what it takes on because of that.

Thousands of agents may be answered in the same moment. If all of them were stopped, collected and judged at once, each would take
as long as all together: stages run past their limits, the machine holds two sandboxes for every rollout, and nothing is
committed for minutes. So a few end at a time, by the machine's cores and the workers that share them, and the others wait, which
is no time of theirs. More end at once as long as the loop keeps up and processors are free: verifiers that mostly wait (a
judge's model, a service) are not held back by the number of cores. While more wait than end, no new attempt is claimed: one that
was given back begins again once the machine has room for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import anyio

from rollyard.core.scratch import count_scratch, scratch

LATE_S = 0.5  # a loop that is so far behind takes on nothing more
_CALM_S = 0.1  # one that is less behind may do more at once
_LOOK_S = 0.2
_COUNT_LOOKS = 25  # from one counting of the machine's workers to the next
_FEWEST = 2
_WORKER = "worker"
_CROWD = 4  # programs for each processor that want it: with more, no more end at once


class LoopLoad:
    """`ending` is held by each rollout that is stopped, collected and judged. `count_running` says how many programs of the
    machine want a processor now, `count_workers` how many workers share its processors, of whatever run and node."""

    def __init__(
        self,
        *,
        cores: int | None = None,
        count_running: Callable[[], int] | None = None,
        count_workers: Callable[[], int] | None = None,
    ) -> None:
        self._cores = cores or os.cpu_count() or 1
        self._count_running = count_running or count_running_programs
        self._count_workers = count_workers or (lambda: count_scratch(_WORKER))
        self._fewest = _FEWEST
        self.ending = anyio.CapacityLimiter(self._fewest)
        self.count_sharers()
        self.late_s = 0.0  # at the last look
        self.turned_at = time.monotonic()  # when the loop was last seen to go on

    async def watch(self) -> None:
        """Measure the loop for as long as the worker works."""
        with scratch(_WORKER):  # what the others count
            for look in count():
                if look % _COUNT_LOOKS == 0:
                    self.count_sharers()
                due = time.monotonic() + _LOOK_S
                await anyio.sleep(_LOOK_S)
                self.turned_at = time.monotonic()
                self.note(self.turned_at - due)

    def count_sharers(self) -> None:
        before = self._fewest
        self._fewest = max(_FEWEST, 2 * self._cores // max(1, self._count_workers()))
        grown = self.ending.total_tokens if self.ending.total_tokens > before else 0
        self.ending.total_tokens = max(self._fewest, grown)

    def note(self, late_s: float) -> None:
        self.late_s = late_s
        places = self.ending.total_tokens
        if late_s > LATE_S:
            places //= 2
        elif self._count_running() > _CROWD * self._cores:
            places = places * 3 // 4
        elif late_s < _CALM_S and self.ending.statistics().tasks_waiting:
            places += self._fewest
        self.ending.total_tokens = max(self._fewest, places)

    async def wait_until_calm(self, busy: Callable[[], bool]) -> None:
        """Until the loop keeps up and no more wait to end than do; at once where there is nothing to wait for."""
        while (self.late_s > LATE_S or self._is_backed_up) and busy():  # noqa: ASYNC110 - there is no signal for its end
            await anyio.sleep(_LOOK_S)

    @property
    def _is_backed_up(self) -> bool:
        return self.ending.statistics().tasks_waiting > self.ending.total_tokens


def count_running_programs() -> int:
    """As the kernel counts them; none where it does not say."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0
