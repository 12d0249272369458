"""`parallel = "auto"`: an agent is started while the machine's memory carries it, by what those that run are measured to hold.

What bounds agents on a machine is their memory while they wait for a model. A count that is right for one kind of agent is wrong
for the next, so none is asked for: an agent is expected to hold what nine of ten have held so far, and one is started when that
much is available beyond a tenth of the machine, which is left free, and beyond what agents that have just started will take.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

import anyio

from rollyard.core.errors import Unsupported
from rollyard.core.protocols import Backend, MeasuresMemory
from rollyard.core.sandbox import MemoryUse
from rollyard.runs.run.config import AUTO

ASSUMED = 512 * 2**20  # of an agent before one was measured; the largest known ones hold 450 MB
HEAD_ROOM = 0.1  # of the machine, which stays free
SETTLED_S = 5.0  # a sandbox so old holds an agent that has started
_KEPT = 200  # sandboxes whose sizes are remembered
_AGAIN_S, _LONGEST_AGAIN_S = 0.25, 5.0


class MemoryAdmission:
    """`machine` measures; `sharers` is how many workers decide like this one on the same machine at the same time."""

    def __init__(
        self,
        machine: MeasuresMemory,
        *,
        sharers: int = 1,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._sharers, self._clock = machine, sharers, clock
        self._starting = 2 * (cores or os.cpu_count() or 1)  # at once, however much memory there is
        self._seen: dict[str, float] = {}  # when each sandbox was seen first
        self._largest: dict[str, int] = {}  # what each that lives held at most, once it had started
        self._sizes: deque[int] = deque(maxlen=_KEPT)  # and those that have ended
        self._again_s = _AGAIN_S  # until it is worth asking again

    @staticmethod
    def of(backend: Backend, *, sharers: int = 1) -> MemoryAdmission:
        if not isinstance(backend, MeasuresMemory):
            raise Unsupported(
                f"parallel = {AUTO!r} goes by the memory of this machine, and backend {backend.name!r} does not say what its "
                "sandboxes hold",
                hint="give a number",
            )
        return MemoryAdmission(backend, sharers=sharers)

    @property
    def expected(self) -> int:
        """The memory that one more agent is expected to hold."""
        sizes = sorted((*self._sizes, *self._largest.values()))
        return sizes[(9 * len(sizes) - 1) // 10] if sizes else ASSUMED

    async def wait(self, in_flight: Callable[[], int]) -> None:
        """Wait until one more agent may start. The kernel sends no signal when memory becomes free, so this polls."""
        while not await self.has_room(in_flight()):  # noqa: ASYNC110 - so it is asked
            await anyio.sleep(self._again_s)

    async def has_room(self, in_flight: int) -> bool:
        """Whether one more may start beside those `in_flight`. Alone it always may: a run goes on."""
        if in_flight == 0:
            return True
        began = self._clock()
        use = await self._machine.memory()
        now = self._clock()
        self._again_s = min(max(_AGAIN_S, 10 * (now - began)), _LONGEST_AGAIN_S)
        young = self._note(use, now)
        unopened = max(0, in_flight - len(use.sandboxes))
        if unopened + len(young) >= self._starting:
            return False
        to_come = unopened * self.expected + sum(max(0, self.expected - held) for held in young)
        return use.available - HEAD_ROOM * use.total - to_come >= self.expected * self._sharers

    def _note(self, use: MemoryUse, now: float) -> list[int]:
        """Remember what sandboxes hold; gives those of agents that may still be starting, or of which nothing can be read."""
        for name in self._seen.keys() - use.sandboxes.keys():
            del self._seen[name]
            if name in self._largest:
                self._sizes.append(self._largest.pop(name))
        young: list[int] = []
        for name, held in use.sandboxes.items():
            if now - self._seen.setdefault(name, now) < SETTLED_S or held == 0:
                young.append(held)
            else:
                self._largest[name] = max(held, self._largest.get(name, 0))
        return young
