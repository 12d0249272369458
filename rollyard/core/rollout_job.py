"""A `RolloutJob`: a run that a client asked a server for, and where it stands. The run itself is in the store under `run_id`."""

from __future__ import annotations

from typing import Literal

import msgspec

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
OPEN_JOBS: tuple[JobState, ...] = ("queued", "running")


class RolloutJob(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is the caller's own name for the request, under which a repeated one finds this job; `body` is the request."""

    id: str
    owner: str
    key: str
    body: str
    run_id: str
    created_at: float
    updated_at: float
    state: JobState = "queued"
    error: str = ""

    @property
    def over(self) -> bool:
        return self.state not in OPEN_JOBS
