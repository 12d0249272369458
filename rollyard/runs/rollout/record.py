"""What a rollout has reached: always a whole `Rollout`, to which stages add what they found when they found it.

A stage that is cut off leaves in the record what it had by then: each setup command when it ended, the agent's events and log,
the calls of its session.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from rollyard.core.protocols import Sandbox
from rollyard.core.rollout import CommandRecord, Rollout
from rollyard.core.task import Task
from rollyard.gate import Session
from rollyard.runs.rollout.agent_log import AgentLog
from rollyard.runs.rollout.agent_monitor import Ending
from rollyard.runs.rollout.failures import classify
from rollyard.runs.rollout.plan import RolloutPlan
from rollyard.runs.rollout.stages import StageFailed, Stages

_TAIL = 8192


class Record:
    """The rollout so far. `stages` is its clock; `log` is given all that the agent prints, in every step."""

    def __init__(self, task: Task, plan: RolloutPlan, backend: str, stages: Stages) -> None:
        self._stages, self._clock = stages, time.monotonic()
        self.log = AgentLog(copy=plan.pauses.log if plan.pauses is not None else None)
        self._reached = Rollout(
            id=plan.rollout_id,
            task=task,
            attempt=plan.attempt,
            run_id=plan.run_id,
            group_id=plan.group_id,
            episode_id=plan.episode_id,
            agent=plan.agent.name,
            agent_version=plan.agent.version,
            mode=plan.mode,
            sandbox=backend,
            seed=plan.options.seed,
            labels=plan.options.labels,
            parent_rollout=plan.parent_rollout,
            parent_call=plan.parent_call,
            resumed=plan.resumed,
            started_at=time.time(),
        )

    @property
    def rollout(self) -> Rollout:
        """As it stands now."""
        stages, wall_s = tuple(self._stages.records), time.monotonic() - self._clock
        return msgspec.structs.replace(self._reached, stages=stages, wall_s=wall_s)

    def note(self, **found: Any) -> None:
        """Fields of the rollout that are known from now on."""
        self._reached = msgspec.structs.replace(self._reached, **found)

    def note_sandbox(self, sandbox: Sandbox) -> None:
        self.note(sandbox_id=sandbox.id, isolation=sandbox.info.isolation, image=sandbox.info.image)

    def note_session(self, session: Session) -> None:
        """Its calls up to now; what the gate said is kept for a rollout that failed."""
        said = session.log_tail() if self._reached.failure is not None else None
        usage = msgspec.to_builtins(session.usage)
        self.note(calls=session.calls, usage=usage, trajectory=session.trajectory, gate_log_tail=said)
        if session.prefix is not None:
            self.note(replayed=session.replayed, pinned=session.prefix.pinned)

    def note_install(self, command: CommandRecord) -> None:
        self.note(install=(*self._reached.install, command))

    def note_command(self, command: CommandRecord) -> None:
        self.note(setup=(*self._reached.setup, command))

    def note_ending(self, ending: Ending) -> None:
        self.note(events=ending.events, exit_code=ending.exit_code)

    def note_log(self) -> None:
        self.note(log=self.log.read(), log_tail=self.log.end(_TAIL).decode("utf-8", "backslashreplace"))

    def fail(self, failed: StageFailed) -> None:
        """The first failure stands, unless the work was to be judged all the same and could not be. A step's verdict goes with
        the attempt that it was a part of."""
        known = self._reached.failure
        if known is not None and known.grade and self._reached.reward is not None:
            return
        status, failure = classify(failed.error, stage=failed.stage, boundary=failed.boundary)
        self.note(status=status, failure=failure)
        if not failure.grade and self._reached.reward is not None:
            self.note(verdict=None)

    def fail_teardown(self, failed: StageFailed) -> None:
        """Something went wrong after all was done: a failure of an attempt that has none, and no reason to run again what was
        graded."""
        if self._reached.failure is None:
            status, failure = classify(failed.error, stage=failed.stage, boundary=failed.boundary)
            graded = self._reached.reward is not None
            self.note(status=status, failure=msgspec.structs.replace(failure, retry=failure.retry and not graded))
