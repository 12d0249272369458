"""A `Rollout` is one attempt at one task, as it ended; a `Verdict` is the evidence behind its reward.

`reward` is None when it was never computed. A failed rollout carries a `Failure`: the boundary it broke at, the cause, and
what may be done with it, all from one table in `runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from rollyard.core.errors import Boundary, StoreError
from rollyard.core.events import AgentEvent
from rollyard.core.sandbox import Exit
from rollyard.core.task import Grade, Task

if TYPE_CHECKING:
    from rollyard.trajectory.trajectory import Trajectory
else:
    Trajectory = Any  # it stands above this package, and is never part of what is encoded

Status = Literal["completed", "agent_error", "infra_error", "timeout", "cancelled", "budget"]
Mode = Literal["black_box", "transparent_proxy", "interception_gate"]
OUTPUT_KEPT = 8192  # characters of each stream of a command that its record keeps
MODES: tuple[Mode, ...] = ("black_box", "transparent_proxy", "interception_gate")


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command of install, setup or verify with its own exit code; None when it timed out or was lost."""

    command: str
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    timed_out: bool = False

    @classmethod
    def of(cls, command: str, done: Exit) -> Self:
        """The record of a program that ended as `done` says, with the end of its output."""
        return cls(
            command=command,
            exit_code=done.exit_code,
            stdout=done.stdout.decode("utf-8", "backslashreplace")[-OUTPUT_KEPT:],
            stderr=done.stderr.decode("utf-8", "backslashreplace")[-OUTPUT_KEPT:],
            duration_s=done.duration_s,
            timed_out=done.timed_out,
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`status` is `scored`, or says why there is no reward. `parts` are named numbers, `checks` named booleans. `safe_path` is
    False where the task lets modules of the working directory stand before Python's own."""

    reward: float | None = None
    status: Literal["scored", "failed", "skipped", "none"] = "scored"
    grade: Grade | None = None
    safe_path: bool = True
    parts: Mapping[str, float] = {}
    checks: Mapping[str, bool] = {}
    log: str = ""
    error: str | None = None
    commands: tuple[CommandRecord, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    boundary: Boundary
    cause: str  # the error's type
    message: str
    stage: str
    retry: bool
    grade: bool
    trainable: bool
    hint: str | None = None
    status: int | None = None  # the model server's HTTP status, where its refusal was the cause


class StageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    started_at: float
    duration_s: float
    error: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model call as people and trainers read it."""

    call_id: str
    kind: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    messages: list[Any] = []
    completion_tokens: list[str] = []
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    latency_s: float | None = None


class MergeCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the calls of a rollout went together into training rows. `call_tokens` are those of a row for each call,
    `row_tokens` those of all rows, `tree_tokens` those that remain where rows share a prefix once."""

    calls: int = 0
    rows: int = 0
    call_tokens: int = 0
    row_tokens: int = 0
    tree_tokens: int = 0


class CallSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of a rollout's sandbox as they were while a call of its agent was held. `image` opens like any image of
    `backend`. `background` names the programs that ran beside the agent, which no file brings back."""

    image: str
    backend: str
    port: int = 0  # where the agent found the gate
    background: tuple[str, ...] = ()
    took_s: float = 0.0


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    task: Task
    attempt: int = 0
    run_id: str | None = None
    group_id: str | None = None
    episode_id: str | None = None
    agent: str = ""
    agent_version: str | None = None
    mode: Mode = "transparent_proxy"
    sandbox_id: str | None = None
    sandbox: str = ""
    isolation: str | None = None
    image: str | None = None
    seed: int | None = None
    labels: Mapping[str, str] = {}
    status: Status = "completed"
    stop_reason: str | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None
    install: tuple[CommandRecord, ...] = ()  # of the agent: an install that failed, each try of its own setup
    setup: tuple[CommandRecord, ...] = ()
    stages: tuple[StageRecord, ...] = ()
    events: tuple[AgentEvent, ...] = ()
    exit_code: int | None = None
    log: bytes = b""  # all that the agent printed; of more than 8 MiB the beginning and the end
    log_tail: str = ""
    gate_log_tail: str | None = None
    files: Mapping[str, bytes] = {}
    workdir: bytes | None = None  # a tar of the working directory as the agent left it
    artifacts: Mapping[str, str] = {}  # name -> blob digest
    diff: str | None = None
    # Paths that `diff` does not show and the agent wrote; None: the backend cannot tell
    writes: tuple[str, ...] | None = None
    parent_rollout: str | None = None  # that it branches off, at `parent_call` (`end`: after its last answer)
    parent_call: str | None = None
    replayed: int = 0  # calls that were answered as the parent's were; `calls` and `usage` are without them
    pinned: int = 0  # of those and the branch point, how many differed from the parent's in clock and ids alone
    resumed: bool = False  # its agent went on from the parent's session, and ran no command of the parent's again
    laid_over: int | None = None  # paths of the working directory that were made the parent's at the branch point
    snapshots: Mapping[str, CallSnapshot] = {}  # by call; `rollyard clean --snapshots` removes them
    calls: int = 0
    usage: Mapping[str, int] = {}
    merged: MergeCounts | None = None  # None where no tokens were captured
    started_at: float = 0.0
    wall_s: float = 0.0
    fence: int | None = None
    stale_before: int | None = None  # answers with tokens of an older policy version do not train (`max_staleness`)
    trajectory: Trajectory | None = None  # while in memory; the store keeps it as calls and nodes

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict is not None else None

    @property
    def trainable(self) -> bool:
        return self.failure is None or self.failure.trainable

    @property
    def captured(self) -> Trajectory:
        """The trajectory of a rollout that has one: it ran in this process, or was read from the store with its calls."""
        if self.trajectory is None:
            raise StoreError(f"rollout {self.id} was loaded without its calls", hint="load it with store.get_rollout")
        return self.trajectory

    @property
    def turns(self) -> list[Turn]:
        """Per-turn records: messages, completion ids, logprobs, finish; [] where nothing was captured (`black_box`)."""
        return self.trajectory.turns() if self.trajectory is not None else []

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def error(self) -> str | None:
        return self.failure.message if self.failure is not None else None

    def _repr_html_(self) -> str:
        """How a notebook shows the rollout."""
        from rollyard.core.html import draw_rollout

        return draw_rollout(self)
