"""The live display of a run on a terminal: a bar, what is in flight and for how long, tokens, rate, time left, and failures put
together by what they say. It is drawn over itself four times a second and gone when the run is over: the report says the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

from rollyard.core.events import STARTED, Event
from rollyard.core.failure_groups import FailureGroup, group_failures
from rollyard.core.ids import short_id
from rollyard.core.rollout import Rollout
from rollyard.runs.display.progress import STOPPING, SilentDisplay, cause_of, words_of
from rollyard.runs.rollout.install_progress import INSTALLS

if TYPE_CHECKING:
    from rich.live import Live

_SLOWEST, _FAILURES = 3, 3  # lines of each that are drawn
_BAR = 24
_WORTH_TELLING_S = 10.0  # a rollout in flight gets a line of its own after this


class _InFlight(NamedTuple):
    who: str
    began: float
    stage: str
    note: str = ""  # what the stage is about


class LiveDisplay(SilentDisplay):
    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        super().__init__(out)
        self._now = clock
        self._console = Console(file=out, highlight=False)
        self._owed, self._done = 0, 0
        self._flying: dict[str, _InFlight] = {}
        self._finished = 0
        self._failures: tuple[FailureGroup, ...] = ()
        self._rewards: list[float] = []
        self._tokens: Counter[str] = Counter()
        self._clock = self._now()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self.draw, transient=True)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, run_id: str, owed: int, done: int) -> None:
        super().begin(run_id, owed, done)
        self._owed, self._done = owed, done
        self._clock = self._now()

    async def event(self, event: Event) -> None:
        if event.rollout_id is None:
            return
        if event.name == STARTED:
            fields = event.fields
            who = "  ".join(str(fields[name]) for name in ("task", "agent", "policy") if fields.get(name))
            self._flying[event.rollout_id] = _InFlight(who, self._now(), "starting")
        elif event.name == "stage.started":
            known = self._flying.get(event.rollout_id, _InFlight("", self._now(), ""))
            self._flying[event.rollout_id] = known._replace(stage=event.fields["stage"], note="")
        elif event.name == INSTALLS and event.rollout_id in self._flying:
            said = f"(once) {event.fields['megabytes']:.0f} MB so far: {event.fields['packages']}"
            self._flying[event.rollout_id] = self._flying[event.rollout_id]._replace(note=said)

    def rollout(self, rollout: Rollout) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self._flying.pop(rollout.id, None)
        self._finished += 1
        self._tokens.update({name: rollout.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        if (failure := rollout.failure) is not None:
            one = FailureGroup(boundary=failure.boundary, cause=failure.cause, message=cause_of(failure), count=1)
            self._failures = group_failures([*self._failures, one])
        if self._live is not None:  # or its line would stand above a bar that does not count it
            self._live.refresh()
        colour = "green" if rollout.status == "completed" else "red"
        words = [Text(word, colour if word == rollout.status else "") for word in words_of(rollout)]
        self._console.print(Text("  ").join(words), no_wrap=True, overflow="ellipsis")
        if rollout.failure is not None:
            self._console.print(Padding(Text(cause_of(rollout.failure)), (0, 0, 0, 2)))

    def stop(self) -> None:
        self._console.print(STOPPING)

    def draw(self) -> Any:
        """Another thread draws, so what may change meanwhile is copied in one step."""
        from rich.text import Text

        flying = list(self._flying.values())
        stages = ", ".join(f"{stage} {n}" for stage, n in Counter(one.stage for one in flying).items()) or "nothing"
        if not self.run_id:  # one rollout, and no run around it
            notes = "".join(f"  {one.note}" for one in flying)
            return Text(f"in flight: {stages}{notes}", no_wrap=True, overflow="ellipsis")
        lines = [self._head(), Text(self._sums()), Text(f"in flight: {stages}")]
        now = self._now()
        slow = (one for one in flying if one.note or now - one.began > _WORTH_TELLING_S)
        for one in sorted(slow, key=lambda one: one.began)[:_SLOWEST]:
            lines.append(Text(f"  {_duration(now - one.began):>6}  {one.who}  {one.stage} {one.note}".rstrip(), "dim"))
        for group in self._failures[:_FAILURES]:
            lines.append(Text(f"  {group.count:>4} x  {group.message}", "red"))
        drawn = Text("\n").join(lines)
        drawn.no_wrap, drawn.overflow = True, "ellipsis"
        return drawn

    def _head(self) -> Any:
        from rich.text import Text

        share = self._finished / self._owed if self._owed else 1.0
        full = round(share * _BAR)
        before = f", {self._done} done before" if self._done else ""
        took = self._now() - self._clock
        left = max(0, self._owed - self._finished)
        ends = f"{_duration(left * took / self._finished)} left" if self._finished else "starting"
        drawn, empty = ("#", "-") if self._console.options.ascii_only else ("━", "━")
        head = Text(drawn * full, "green").append(empty * (_BAR - full), "bright_black")
        return head.append(f"  {self._finished}/{self._owed} attempts{before}  {ends}  run {short_id(self.run_id)}")

    def _sums(self) -> str:
        mean = f"mean reward {sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "no reward yet"
        took = self._now() - self._clock
        rate = f"{self._finished / took * 60:.1f} a minute" if took > 0 else ""
        tokens = "".join(
            f"  {_count(self._tokens[name])} tokens {word}" for name, word in _TOKENS if self._tokens[name]
        )
        return f"{mean}  {rate}{tokens}"


_TOKENS = (("prompt_tokens", "in"), ("completion_tokens", "out"))


def _count(number: int) -> str:
    return (
        str(number) if number < 10_000 else f"{number / 1000:.0f}k" if number < 10_000_000 else f"{number / 1e6:.0f}M"
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
