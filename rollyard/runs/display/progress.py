"""How a run shows itself while it works: `rich` (a live table), `notebook` (the same in a Jupyter cell), `plain` (a line per
attempt), `json` (a line per event), `none`.

All of them take the same two things: events as they happen and rollouts as they end.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, Protocol, Self

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.events import Event
from rollyard.core.numbers import count
from rollyard.core.printable import printable
from rollyard.core.rollout import Failure, Rollout
from rollyard.runs.rollout.install_progress import INSTALLS

STOPPING = "stopping: ending what is in flight (Ctrl-C again leaves at once)"
_CAUSE = 300  # characters of a failure's message that are shown while a run goes on


class Display(Protocol):
    """`run_id` is empty until a run begins."""

    run_id: str

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def begin(self, run_id: str, owed: int, done: int) -> None: ...
    async def event(self, event: Event) -> None: ...
    def rollout(self, rollout: Rollout) -> None: ...
    def stop(self) -> None:
        """The run is being cancelled; it ends when what is in flight has been ended."""
        ...


def display(style: str, out: IO[str] | None = None) -> Display:
    stream: IO[str] = out if out is not None else sys.stderr
    from rollyard.runs.display.live import LiveDisplay
    from rollyard.runs.display.notebook import NotebookDisplay, in_notebook

    if style == "auto":
        style = "notebook" if out is None and in_notebook() else "rich" if moves_cursor(stream) else "plain"
    kinds: dict[str, type[Display]] = {
        "rich": LiveDisplay,
        "notebook": NotebookDisplay,
        "plain": _Plain,
        "json": _Json,
        "none": SilentDisplay,
    }
    if style not in kinds:
        raise ConfigError(f"no display named {style!r}; there are {', '.join(kinds)} and auto")
    return kinds[style](stream)  # type: ignore[call-arg]  # all take the stream


def moves_cursor(stream: IO[str]) -> bool:
    """A terminal on which what was drawn can be drawn over."""
    return stream.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


def one_line(rollout: Rollout) -> str:
    words = words_of(rollout)
    if rollout.failure is not None:
        words.append(f"[{cause_of(rollout.failure)}]")
    return "  ".join(words)


def words_of(rollout: Rollout) -> list[str]:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    policy = rollout.labels.get("policy")
    agent = f"{rollout.agent} / {policy}" if policy else rollout.agent
    words = [rollout.task.id, f"#{rollout.attempt}", agent, rollout.status, reward]
    return [*words, f"{rollout.calls} calls", f"{rollout.wall_s:.1f} s"]


def cause_of(failure: Failure) -> str:
    """On one line and printable: parts of it were written by programs."""
    message = printable(" ".join(failure.message.split()))
    return f"{failure.boundary}: {message[:_CAUSE] + '...' if len(message) > _CAUSE else message}"


class SilentDisplay:
    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self.run_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, run_id: str, owed: int, done: int) -> None:
        self.run_id = run_id

    async def event(self, event: Event) -> None:
        return None

    def rollout(self, rollout: Rollout) -> None:
        return None

    def stop(self) -> None:
        return None


class _Plain(SilentDisplay):
    def __init__(self, out: IO[str]) -> None:
        super().__init__(out)
        self._installed: set[str] = set()

    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        already = f", {done} already done" if done else ""
        print(f"run {run_id}: {count(owed, 'attempt')} to do{already}", file=self._out, flush=True)

    async def event(self, event: Event) -> None:
        """An install is reported once: it takes long, and the next one does not."""
        if event.name == INSTALLS and event.fields["packages"] not in self._installed:
            self._installed.add(event.fields["packages"])
            print(f"installing {printable(event.fields['packages'])}, once", file=self._out, flush=True)

    def rollout(self, rollout: Rollout) -> None:
        print(one_line(rollout), file=self._out, flush=True)

    def stop(self) -> None:
        print(STOPPING, file=self._out, flush=True)


class _Json(SilentDisplay):
    """One JSON object a line: `{"event": ...}` and `{"rollout": ...}`."""

    def _line(self, value: Any) -> None:
        print(msgspec.json.encode(value).decode(), file=self._out, flush=True)

    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        self._line({"run": run_id, "owed": owed, "done": done})

    async def event(self, event: Event) -> None:
        self._line({"event": event})

    def rollout(self, rollout: Rollout) -> None:
        self._line({"rollout": summary(rollout)})


def summary(rollout: Rollout) -> dict[str, Any]:
    """The fields of a rollout that fit on a line."""
    return {
        "id": rollout.id,
        "task_id": rollout.task.id,
        "attempt": rollout.attempt,
        "agent": rollout.agent,
        "status": rollout.status,
        "reward": rollout.reward,
        "calls": rollout.calls,
        "parent_rollout": rollout.parent_rollout,
        "parent_call": rollout.parent_call,
        "wall_s": round(rollout.wall_s, 3),
        "failure": None if rollout.failure is None else msgspec.to_builtins(rollout.failure),
    }
