"""`HeldCallTable`: the calls that wait for the trainer, safe from any thread.

One plain lock, held for a few statements, guards everything. A caller that waits leaves a `Wake`: a function that reaches its own
loop or thread. No future, event or queue of one loop is ever touched from another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from rollyard.core.errors import PolicyClosed, UpstreamError
from rollyard.policy.held_call import HeldCall

REMEMBERED = 65536  # closed rollouts whose late waiter still learns that they are over
Wake = Callable[[], None]


class HeldCallTable:
    def __init__(self, max_held: int) -> None:
        self.max_held = max_held
        self._lock = threading.Lock()
        self._held: dict[str, HeldCall] = {}
        self._untaken: OrderedDict[str, deque[HeldCall]] = OrderedDict()  # rollouts in the order they are served
        self._over: OrderedDict[str, None] = OrderedDict()
        self._wakes: dict[str | None, set[Wake]] = {}  # None: waits for any rollout
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def untaken(self) -> int:
        with self._lock:
            return sum(len(calls) for calls in self._untaken.values())

    def add(self, held: HeldCall) -> None:
        rollout = held.call.rollout_id
        with self._lock:
            if self._closed or rollout in self._over:
                raise PolicyClosed("calls of this rollout are not answered any more")
            if len(self._held) >= self.max_held:
                raise UpstreamError(f"{self.max_held} calls are held already", status=503, retry_after=1.0)
            if held.call.id in self._held:
                raise PolicyClosed(f"call {held.call.id} is held already")
            self._held[held.call.id] = held
            self._untaken.setdefault(rollout, deque()).append(held)
            wakes = [*self._wakes.get(rollout, ()), *self._wakes.get(None, ())]
        for wake in wakes:
            wake()

    def finish(self, held: HeldCall) -> bool:
        """Ends a held call; False when it had ended before."""
        rollout = held.call.rollout_id
        with self._lock:
            was, held.open = held.open, False
            if self._held.get(held.call.id) is held:
                del self._held[held.call.id]
            if held in self._untaken.get(rollout, ()):
                self._untaken[rollout].remove(held)
                if not self._untaken[rollout]:
                    del self._untaken[rollout]
        return was

    def find(self, call_id: str) -> HeldCall | None:
        with self._lock:
            return self._held.get(call_id)

    def pop(self, rollout: str | None, count: int) -> list[HeldCall] | None:
        """Up to `count` untaken calls, one of each rollout in turn. [] when none will come any more, None when none is
        there yet."""
        with self._lock:
            batch: list[HeldCall] = []
            while len(batch) < count and (self._untaken if rollout is None else rollout in self._untaken):
                name = next(iter(self._untaken)) if rollout is None else rollout
                calls = self._untaken[name]
                batch.append(calls.popleft())
                if calls:
                    self._untaken.move_to_end(name)
                else:
                    del self._untaken[name]
            return batch if batch or self._is_over(rollout) else None

    def _is_over(self, rollout: str | None) -> bool:
        return self._closed or (rollout is not None and rollout in self._over)

    def subscribe(self, rollout: str | None, wake: Wake) -> bool:
        """Have `wake` called at the next change; False, and nothing, when there is something for its caller already."""
        with self._lock:
            if self._is_over(rollout) or (self._untaken if rollout is None else rollout in self._untaken):
                return False
            self._wakes.setdefault(rollout, set()).add(wake)
            return True

    def unsubscribe(self, rollout: str | None, wake: Wake) -> None:
        with self._lock:
            waiting = self._wakes.get(rollout, set())
            waiting.discard(wake)
            if not waiting:
                self._wakes.pop(rollout, None)

    def close(self, rollout: str | None) -> list[HeldCall]:
        """Ends one rollout, or everything; returns the calls that were still held and wakes everyone concerned."""
        with self._lock:
            if rollout is None:
                self._closed = True
                ending = list(self._held.values())
                wakes = [wake for waiting in self._wakes.values() for wake in waiting]
            else:
                self._over[rollout] = None
                while len(self._over) > REMEMBERED:
                    self._over.popitem(last=False)
                ending = [h for h in self._held.values() if h.call.rollout_id == rollout]
                wakes = list(self._wakes.get(rollout, ()))
        for wake in wakes:
            wake()
        return ending
