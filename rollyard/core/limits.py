"""One `Limits` value holds every deadline of a rollout; a `Deadline` is what is left of one.

`verify` is reserved out of `total`: an agent that uses up its time is still judged. A sandbox must outlive all of it, so
its TTL is `total` plus a margin (`ttl_s`).
"""

from __future__ import annotations

import time
from typing import Self

import msgspec

from rollyard.core.errors import ConfigError

TTL_MARGIN_S = 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. Each stage's error names the field that ended it."""

    boot: float = 15.0
    install: float = 240.0
    setup: float = 300.0
    agent: float = 600.0
    verify: float = 600.0
    total: float | None = None
    idle: float = 180.0  # the agent's watchdog: no call in flight, no CPU, no output

    def __post_init__(self) -> None:
        for name in ("boot", "install", "setup", "agent", "verify", "idle"):
            value = getattr(self, name)
            if not 0 < value < 30 * 86400:
                raise ConfigError(f"limits.{name} must be more than 0 s and less than 30 days, got {value:g} s")
        if self.total is not None and not self.verify < self.total < 30 * 86400:
            raise ConfigError(
                f"limits.total must leave room for limits.verify ({self.verify} s), got {self.total!r}",
                hint="raise total or lower verify",
            )

    @property
    def total_s(self) -> float:
        """`total`, or the sum of the stages when it was not set."""
        return (
            self.total if self.total is not None else self.boot + self.install + self.setup + self.agent + self.verify
        )

    @property
    def ttl_s(self) -> float:
        """How long a sandbox must live so that judging is never cut off."""
        return self.total_s + TTL_MARGIN_S


class Deadline(msgspec.Struct, frozen=True):
    """A point on the monotonic clock. Stages take the smaller of their own limit and what the whole has left."""

    at: float
    name: str  # of the setting that it comes from
    limit_s: float  # what that setting says

    @classmethod
    def after(cls, seconds: float, name: str, limit_s: float | None = None) -> Self:
        """`limit_s` is the setting's own number, where only a part of it is left for this."""
        return cls(time.monotonic() + seconds, name, seconds if limit_s is None else limit_s)

    @property
    def left(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def later(self, seconds: float) -> Deadline:
        return Deadline(self.at + seconds, self.name, self.limit_s)

    def sooner(self, other: Deadline) -> Deadline:
        return self if self.at <= other.at else other
