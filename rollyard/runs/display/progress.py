"""How a run shows itself while it works: `rich` (a live table), `plain` (a line per attempt), `json` (a line per event), `none`.

All four take the same two things: events as they happen and rollouts as they end.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from types import TracebackType
from typing import IO, Any, Protocol, Self

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.events import Event
from rollyard.core.rollout import Failure, Rollout
from rollyard.store.listing import printable

_STOPPING = "stopping: ending what is in flight (Ctrl-C again leaves at once)"
_CAUSE = 300  # characters of a failure's message that are shown while a run goes on


class Display(Protocol):
    """`run_id` is empty until a run begins."""

    run_id: str

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def begin(self, run_id: str, owed: int, done: int) -> None: ...
    async def event(self, event: Event) -> None: ...
    def rollout(self, rollout: Rollout) -> None: ...
    def stop(self) -> None:
        """The run is being cancelled; it ends when what is in flight has been ended."""
        ...


def display(style: str, out: IO[str] | None = None) -> Display:
    stream: IO[str] = out if out is not None else sys.stderr
    if style == "auto":
        style = "rich" if moves_cursor(stream) else "plain"
    kinds: dict[str, type[Display]] = {"rich": _Rich, "plain": _Plain, "json": _Json, "none": Silent}
    if style not in kinds:
        raise ConfigError(f"no display named {style!r}; there are {', '.join(kinds)} and auto")
    return kinds[style](stream)  # type: ignore[call-arg]  # all four take the stream


def moves_cursor(stream: IO[str]) -> bool:
    """A terminal on which what was drawn can be drawn over."""
    return stream.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


def one_line(rollout: Rollout) -> str:
    words = _words(rollout)
    if rollout.failure is not None:
        words.append(f"[{_cause(rollout.failure)}]")
    return "  ".join(words)


def _words(rollout: Rollout) -> list[str]:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    policy = rollout.labels.get("policy")
    agent = f"{rollout.agent} / {policy}" if policy else rollout.agent
    words = [rollout.task.id, f"#{rollout.attempt}", agent, rollout.status, reward]
    return [*words, f"{rollout.calls} calls", f"{rollout.wall_s:.1f} s"]


def _cause(failure: Failure) -> str:
    """On one line and printable: parts of it were written by programs."""
    message = printable(" ".join(failure.message.split()))
    return f"{failure.boundary}: {message[:_CAUSE] + '...' if len(message) > _CAUSE else message}"


class Silent:
    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self.run_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, run_id: str, owed: int, done: int) -> None:
        self.run_id = run_id

    async def event(self, event: Event) -> None:
        return None

    def rollout(self, rollout: Rollout) -> None:
        return None

    def stop(self) -> None:
        return None


class _Plain(Silent):
    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        already = f", {done} already done" if done else ""
        print(f"run {run_id}: {owed} attempts to do{already}", file=self._out, flush=True)

    def rollout(self, rollout: Rollout) -> None:
        print(one_line(rollout), file=self._out, flush=True)

    def stop(self) -> None:
        print(_STOPPING, file=self._out, flush=True)


class _Json(Silent):
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
        "wall_s": round(rollout.wall_s, 3),
        "failure": None if rollout.failure is None else msgspec.to_builtins(rollout.failure),
    }


class _Rich(Silent):
    """What is in flight by stage, what ended how, failures by boundary, rate and time left; redrawn four times a second, and
    gone when the run is over: the report says the rest."""

    def __init__(self, out: IO[str]) -> None:
        from rich.console import Console

        super().__init__(out)
        self._console = Console(file=out, highlight=False)
        self._owed, self._done = 0, 0
        self._stage_of: dict[str, str] = {}
        self._statuses: Counter[str] = Counter()
        self._boundaries: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._clock = time.monotonic()

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._draw, transient=True)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        self._owed, self._done = owed, done
        self._clock = time.monotonic()

    async def event(self, event: Event) -> None:
        if event.name == "stage.started" and event.rollout_id is not None:
            self._stage_of[event.rollout_id] = event.fields["stage"]

    def rollout(self, rollout: Rollout) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self._stage_of.pop(rollout.id, None)
        self._statuses[rollout.status] += 1
        if rollout.failure is not None:
            self._boundaries[rollout.failure.boundary] += 1
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        colour = "green" if rollout.status == "completed" else "red"
        words = [Text(word, colour if word == rollout.status else "") for word in _words(rollout)]
        self._console.print(Text("  ").join(words), no_wrap=True, overflow="ellipsis")
        if rollout.failure is not None:
            self._console.print(Padding(Text(_cause(rollout.failure)), (0, 0, 0, 2)))

    def stop(self) -> None:
        self._console.print(_STOPPING)

    def _draw(self) -> Any:
        from rich.text import Text

        finished = sum(self._statuses.values())
        took = time.monotonic() - self._clock
        rate = finished / took if took > 0 else 0.0
        left = max(0, self._owed - finished)
        mean = f"mean reward {sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "no reward yet"
        stages = list(self._stage_of.values())  # a copy in one step: another thread draws
        flight = ", ".join(f"{stage} {n}" for stage, n in Counter(stages).items()) or "nothing"
        if not self.run_id:  # one rollout, and no run around it
            return Text(f"in flight: {flight}", no_wrap=True, overflow="ellipsis")
        before = f", {self._done} done before" if self._done else ""
        lines = [
            f"run {self.run_id}  {finished}/{self._owed} attempts{before}  "
            + (f"{_duration(left / rate)} left" if rate else "starting"),
            f"{mean}  {rate * 60:.1f} a minute  in flight: {flight}",
        ]
        if self._boundaries:
            lines.append("failed at: " + ", ".join(f"{name} {n}" for name, n in self._boundaries.items()))
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
