"""What the store gives back when it is asked about runs and rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from rollyard.core.events import Event
from rollyard.core.lease import AttemptState
from rollyard.core.rollout import Rollout, Status, Verdict

SortKey = Literal[
    "started_at", "task_id", "attempt", "agent", "policy", "status", "reward", "boundary", "calls", "prompt_tokens",
    "completion_tokens", "wall_s",
]  # fmt: skip
RunSortKey = Literal["created_at", "id", "rollouts", "scored", "mean_reward"]


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A run and where it stands. `mean_reward` is over the scored rollouts, None when there are none."""

    id: str
    created_at: float
    config: Mapping[str, Any]
    attempts: Mapping[AttemptState, int]
    rollouts: int
    scored: int
    mean_reward: float | None

    @property
    def finished(self) -> bool:
        return not self.attempts.get("owed") and not self.attempts.get("leased")


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts a list shows, in which order. `search` is a part of a task id or the start of a rollout id."""

    run_id: str | None = None
    task_id: str | None = None
    agent: str | None = None
    policy: str | None = None
    status: str | None = None
    boundary: str | None = None
    cause: str | None = None
    group_id: str | None = None
    search: str | None = None
    sort: SortKey = "started_at"
    descending: bool = False
    limit: int = 100
    offset: int = 0


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a list of rollouts."""

    id: str
    run_id: str | None
    task_id: str
    attempt: int
    group_id: str | None
    agent: str
    mode: str
    status: Status
    reward: float | None
    boundary: str | None
    calls: int
    started_at: float
    wall_s: float
    policy: str | None = None
    cause: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt tokens
    merged_calls: int | None = None  # these five are None where no tokens were captured; see `MergeCounts`
    merged_rows: int | None = None
    call_tokens: int | None = None
    row_tokens: int | None = None
    tree_tokens: int | None = None


def line_name(row: RolloutRow) -> str:
    """The agent, and the policy's name where the run has several."""
    return f"{row.agent} / {row.policy}" if row.policy else row.agent


class Spent(NamedTuple):
    """Tokens of committed rollouts that one policy answered; None is the only policy of its run."""

    policy: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def row_of(rollout: Rollout) -> RolloutRow:
    """The line that a rollout has in a list."""
    merged = rollout.merged
    return RolloutRow(
        id=rollout.id,
        run_id=rollout.run_id,
        task_id=rollout.task.id,
        attempt=rollout.attempt,
        group_id=rollout.group_id,
        agent=rollout.agent,
        mode=rollout.mode,
        status=rollout.status,
        reward=rollout.reward,
        boundary=rollout.failure.boundary if rollout.failure is not None else None,
        calls=rollout.calls,
        started_at=rollout.started_at,
        wall_s=rollout.wall_s,
        policy=rollout.labels.get("policy"),
        cause=rollout.failure.cause if rollout.failure is not None else None,
        prompt_tokens=rollout.usage.get("prompt_tokens"),
        completion_tokens=rollout.usage.get("completion_tokens"),
        cached_tokens=rollout.usage.get("cached_tokens"),
        merged_calls=merged and merged.calls,
        merged_rows=merged and merged.rows,
        call_tokens=merged and merged.call_tokens,
        row_tokens=merged and merged.row_tokens,
        tree_tokens=merged and merged.tree_tokens,
    )


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """`total` counts everything that fits the filter; `next` is the offset to go on with, None at the end."""

    rows: tuple[RolloutRow, ...]
    total: int
    next: int | None


class StoredEvent(msgspec.Struct, frozen=True):
    """`seq` grows in commit order: who has seen it has seen everything before it."""

    seq: int
    event: Event


NoteKind = Literal["note", "label", "score"]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a person said about a rollout: words, a label, or a score of their own."""

    id: int
    rollout_id: str
    at: float
    author: str
    kind: NoteKind
    name: str = ""
    text: str = ""
    score: float | None = None


class StoredVerdict(msgspec.Struct, frozen=True):
    """One judgement of a rollout; rescoring adds another."""

    at: float
    verdict: Verdict


class ArtifactInfo(msgspec.Struct, frozen=True):
    """A file kept with a rollout, under the hexadecimal digest of its content."""

    name: str
    digest: str
    size: int
