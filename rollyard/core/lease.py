"""An `Attempt` is one cell of a run (task x agent x policy x number); a `Lease` is the expiring, exclusive claim to do it.

The fencing number grows with every claim of the same attempt. A worker that commits must show the current one, so an owner that
was presumed dead and wakes up can commit nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AttemptState = Literal["owed", "leased", "done", "failed", "cancelled"]


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tries` counts claims; `state` is `done` once a rollout was committed, `failed` when its retries are used up,
    `cancelled` when its client does not want it any more. `image` names what a machine has to fetch or build for it (empty:
    nothing), `gpus` how many it has to have."""

    id: str
    run_id: str
    task_id: str
    task_digest: str = ""
    agent: str = ""
    policy: str = ""
    number: int = 0
    seed: int | None = None
    state: AttemptState = "owed"
    tries: int = 0
    rollout_id: str | None = None
    image: str = ""
    gpus: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    attempt: Attempt
    owner: str
    fence: int
    expires_at: float
