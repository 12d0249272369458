"""Is the agent working, waiting for a slow model, parked, or only lingering? A decision, with no clock and no I/O of its own.

Parked: no model call in flight, no output, and next to no CPU, for `idle_s` seconds. A call in flight is never parked, however
long it takes: that is the model's slowness. Lingering: the agent has said that it is done, and its process stays. An agent
that goes on after a `done` (pi retries a failed call) takes that word back.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["working", "model_slow", "parked", "lingering"]
BUSY_SHARE = 0.02  # of one core: an idle Node process uses less, a working one far more


class ActivitySample(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one moment. `cpu_s` is the CPU time of the whole process tree so far, None where it is not known;
    `last_output_at` and `last_call_at` are times of its latest signs of life. It counts as busy where it was not `looked` at,
    because it had just shown such a sign. `done_at` is when it said that it is done, None
    once a later event has taken that back."""

    at: float
    in_flight: int
    last_output_at: float
    last_call_at: float = 0.0
    cpu_s: float | None = None
    looked: bool = True
    done_at: float | None = None


class Watchdog:
    """Shown samples in the order of time, says what they mean."""

    def __init__(self, *, idle_s: float, linger_s: float) -> None:
        self._idle_s, self._linger_s = idle_s, linger_s
        self._busy_at: float | None = None
        self._last: ActivitySample | None = None

    def see(self, now: ActivitySample) -> State:
        before, self._last = self._last, now
        if self._busy_at is None or now.in_flight or not now.looked or self._burns_cpu(before, now):
            self._busy_at = now.at
        quiet_since = max(self._busy_at, now.last_output_at, now.last_call_at)
        if now.in_flight:
            waiting = now.at - max(now.last_output_at, now.last_call_at)
            return "model_slow" if waiting >= self._idle_s else "working"
        if now.done_at is not None and now.done_at >= now.last_call_at and now.at - now.done_at >= self._linger_s:
            return "lingering"
        return "parked" if now.at - quiet_since >= self._idle_s else "working"

    @staticmethod
    def _burns_cpu(before: ActivitySample | None, now: ActivitySample) -> bool:
        if before is None or before.cpu_s is None or now.cpu_s is None or now.at <= before.at:
            return False
        return (now.cpu_s - before.cpu_s) / (now.at - before.at) > BUSY_SHARE
