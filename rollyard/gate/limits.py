"""What bounds the gate: `GateLimits` for the server, `Budget` for one rollout, `Tls` for a public bind."""

from __future__ import annotations

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.net.http_server import HttpLimits


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of a certificate chain and its private key."""

    cert: str
    key: str


class GateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds and counts for the whole gate."""

    http: HttpLimits = HttpLimits()
    status_s: float = 20.0  # how long the real status is held back before a stream is opened
    keepalive_s: float = 10.0  # between keepalives of an opened stream
    call_s: float = 1800.0  # the longest a policy may take
    commit_s: float = 30.0
    close_s: float = 10.0  # for what is being committed when a session closes
    queue_s: float = 15.0  # how long a call waits for its turn before 503
    orphan_s: float = 600.0  # how long a call goes on with no reader
    orphan_held_s: float = 0.0  # the same for a call that a trainer holds
    concurrent: int = 4096  # calls at the policies at once, all rollouts together
    queue: int = 256  # calls of one rollout that may wait for their turn
    connections: int = 512  # on one sandbox's listener
    replays: int = 64  # answers of one rollout kept for a reader that comes back
    closed_keys: int = 65_536  # keys of closed rollouts that are remembered, so that a late call gets that answer
    tick_s: float = 1.0


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one rollout may use; None is no bound. Past `calls`, tokens or `wall_s` the agent is asked politely to stop;
    past `concurrent` its calls wait; a larger body than `body` is refused."""

    calls: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    wall_s: float | None = None
    concurrent: int = 64
    body: int | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "prompt_tokens", "completion_tokens", "wall_s", "concurrent", "body"):
            value = getattr(self, name)
            if value is not None and value < (1 if name in ("concurrent", "body") else 0):
                raise ConfigError(f"budget.{name} must not be negative or empty, got {value!r}")
