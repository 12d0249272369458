"""Stages: each has a name, a boundary, a time limit out of one `Limits`, and leaves a record and two events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rollyard.core.errors import AgentTimeout, Boundary, CommandTimeout, Error, VerifierError
from rollyard.core.events import Event
from rollyard.core.limits import Deadline, Limits
from rollyard.core.protocols import EventSink
from rollyard.core.rollout import StageRecord

# stage -> the boundary an error without one of its own is charged to, and the field of `Limits` that bounds it
STAGES: dict[str, tuple[Boundary, str]] = {
    "install": ("sandbox", "install"),
    "provision": ("sandbox", "boot"),
    "prepare": ("sandbox", "setup"),
    "launch": ("agent", "setup"),
    "wait": ("agent", "agent"),
    "stop": ("sandbox", "setup"),
    "verify": ("verifier", "verify"),
    "collect": ("sandbox", "setup"),
}


async def drop_event(event: Event) -> None:
    """The sink for callers that keep no events."""


class StageFailed(Exception):
    """An error on its way out of a stage, with the stage's name; `runs` turns it into a `Failure`."""

    def __init__(self, stage: str, boundary: Boundary, error: Exception) -> None:
        super().__init__(str(error))
        self.stage = stage
        self.boundary: Boundary = boundary
        self.error = error


class Stages:
    """The clock of one rollout. `verify`'s share of the total is reserved: earlier stages cannot use it up."""

    def __init__(
        self,
        rollout_id: str,
        limits: Limits,
        sink: EventSink,
        run_id: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.records: list[StageRecord] = []
        self.current = "provision"
        self._rollout_id, self._run_id = rollout_id, run_id
        self._sink = sink
        self._clock = clock
        self._before_verify = Deadline.after(
            max(1.0, limits.total_s - limits.verify), "limits.total", limit_s=limits.total_s
        )

    async def tell(self, name: str, **fields: Any) -> None:
        await self._sink(
            Event(at=time.time(), name=name, rollout_id=self._rollout_id, run_id=self._run_id, fields=fields)
        )

    def deadline(self, stage: str, *, limit_s: float | None = None, limit_name: str | None = None) -> Deadline:
        """The stage's own limit, or `limit_s` out of the setting `limit_name`; the total where less is left of that."""
        field = STAGES[stage][1]
        seconds = limit_s if limit_s is not None else getattr(self.limits, field)
        own = Deadline.after(seconds, limit_name or f"limits.{field}")
        return own if stage in {"verify", "collect", "stop"} else own.sooner(self._before_verify)

    @asynccontextmanager
    async def pause(self) -> AsyncGenerator[None]:
        """The time that its body takes does not count as the rollout's."""
        began = self._clock()
        try:
            yield
        finally:
            self._before_verify = self._before_verify.later(self._clock() - began)

    @asynccontextmanager
    async def stage(
        self, name: str, *, limit_s: float | None = None, limit_name: str | None = None
    ) -> AsyncGenerator[Deadline]:
        """Runs its body under the stage's deadline. Errors of any kind leave as `StageFailed`; cancellation passes."""
        self.current = name
        boundary = STAGES[name][0]
        deadline = self.deadline(name, limit_s=limit_s, limit_name=limit_name)
        started, clock = time.time(), time.monotonic()
        problem: str | None = None
        await self.tell("stage.started", stage=name, limit_s=round(deadline.left, 3))
        try:
            with anyio.fail_after(deadline.left):
                yield deadline
        except TimeoutError as error:  # its own, or one of something inside that had less time
            late = _timeout_error(name, deadline, self.limits) if not deadline.left else error
            problem = str(late) or "something inside it took too long"
            raise StageFailed(name, boundary, late) from error
        except StageFailed as error:
            problem = str(error)
            raise
        except Exception as error:  # every error is classified once, here, at the boundary it crossed
            problem = str(error) or type(error).__name__
            raise StageFailed(name, boundary, error) from error
        finally:
            with anyio.CancelScope(shield=True):
                took = time.monotonic() - clock
                self.records.append(StageRecord(name=name, started_at=started, duration_s=took, error=problem))
                await self.tell("stage.finished", stage=name, duration_s=round(took, 6), error=problem)


def _timeout_error(stage: str, deadline: Deadline, limits: Limits) -> Error:
    text = f"{stage} ran past {deadline.name} ({deadline.limit_s:g} s{_name_reserve(deadline, limits)})"
    hint = f"raise {deadline.name}"
    if stage == "wait":
        return AgentTimeout(text, hint=hint)
    return VerifierError(text, hint=hint) if stage == "verify" else CommandTimeout(text, hint=hint)


def _name_reserve(deadline: Deadline, limits: Limits) -> str:
    if deadline.name != "limits.total":
        return ""
    whole = "" if limits.total is not None else ", the sum of the stages' limits"
    return f"{whole}, of which limits.verify keeps {limits.verify:g} s"
