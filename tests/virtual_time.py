"""An event loop whose clock jumps to the next timer whenever nothing is ready: hours of timeouts in no time, in exact order.

Only for code that waits for timers and for its own tasks: to such a loop a thread or another process takes no time at all.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class JumpingSelector(selectors.DefaultSelector):
    now = 0.0
    count = 0

    def select(self, timeout=None):
        ready = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self.now += timeout
            self.count += 1
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumps = JumpingSelector()
        super().__init__(self.jumps)

    def time(self) -> float:
        return self.jumps.now


def run_in_virtual_time(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
