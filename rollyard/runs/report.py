"""The statistics of a run as one frozen value, and that value as text.

Tasks, not attempts, are resampled for intervals. An attempt without a reward is counted under its failure and nowhere else.
Cost appears only with a price table the caller gives.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, Iterable, Mapping
from statistics import fmean, median

import msgspec

from rollyard.core.rollout import Rollout
from rollyard.runs import statistics
from rollyard.runs.statistics import Groups, Interval

SOLVED = 1.0


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Money per million tokens, in the caller's own currency."""

    prompt: float
    completion: float


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One agent (and policy) of the run."""

    name: str
    tasks: int
    attempts: int
    scored: int
    reward: Interval
    pass_at: dict[int, Interval]
    pass_hat: dict[int, Interval]
    prompt_tokens: int
    completion_tokens: int
    calls: int
    wall_s: float
    cost: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    tasks: int
    attempts: int
    scored: int
    lines: tuple[Line, ...]
    rewards: dict[str, int]  # histogram: lower edge of a tenth -> attempts; "unscored" apart
    stages: dict[str, tuple[float, float]]  # stage -> median and total seconds
    failures: dict[str, dict[str, int]]  # boundary -> cause -> attempts
    statuses: dict[str, int]
    groups: Groups

    def __str__(self) -> str:
        return text(self)


class Tally:
    """Takes rollouts one at a time, so that a run of any size is summed in bounded memory."""

    def __init__(self, run_id: str, prices: Mapping[str, Price] | None = None) -> None:
        self.run_id = run_id
        self._prices = prices or {}
        self._rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._tasks: dict[str, set[str]] = defaultdict(set)
        self._sums: dict[str, Counter[str]] = defaultdict(Counter)
        self._wall: dict[str, float] = defaultdict(float)
        self._histogram: Counter[str] = Counter()
        self._stages: dict[str, list[float]] = defaultdict(list)
        self._failures: dict[str, Counter[str]] = defaultdict(Counter)
        self._statuses: Counter[str] = Counter()

    def add(self, rollout: Rollout) -> None:
        name = line_name(rollout)
        self._tasks[name].add(rollout.task.id)
        sums = self._sums[name]
        sums["attempts"] += 1
        sums["calls"] += rollout.calls
        sums["prompt_tokens"] += rollout.usage.get("prompt_tokens") or 0
        sums["completion_tokens"] += rollout.usage.get("completion_tokens") or 0
        self._wall[name] += rollout.wall_s
        self._statuses[rollout.status] += 1
        if rollout.reward is None:
            self._histogram["unscored"] += 1
        else:
            self._rewards[name][rollout.task.id].append(rollout.reward)
            self._histogram[f"{min(int(rollout.reward * 10), 10) / 10:.1f}"] += 1
        for stage in rollout.stages:
            self._stages[stage.name].append(stage.duration_s)
        if rollout.failure is not None:
            self._failures[rollout.failure.boundary][rollout.failure.cause] += 1

    def report(self) -> Report:
        lines = tuple(self._line(name) for name in sorted(self._sums))
        everything = {f"{n}\0{t}": v for n, tasks in self._rewards.items() for t, v in tasks.items()}
        return Report(
            run_id=self.run_id,
            tasks=len(set().union(*self._tasks.values())) if self._tasks else 0,
            attempts=sum(line.attempts for line in lines),
            scored=sum(line.scored for line in lines),
            lines=lines,
            rewards=dict(sorted(self._histogram.items())),
            stages={name: (median(times), sum(times)) for name, times in self._stages.items()},
            failures={boundary: dict(causes) for boundary, causes in sorted(self._failures.items())},
            statuses=dict(self._statuses),
            groups=statistics.groups(everything),
        )

    def _line(self, name: str) -> Line:
        rewards, sums = self._rewards[name], self._sums[name]
        per_task = [fmean(values) for values in rewards.values()]
        attempts = {task: (len(values), sum(v >= SOLVED for v in values)) for task, values in rewards.items()}
        top = max((n for n, _ in attempts.values()), default=0)
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= top]
        price = self._prices.get(name)
        return Line(
            name=name,
            tasks=len(self._tasks[name]),
            attempts=sums["attempts"],
            scored=sum(len(values) for values in rewards.values()),
            reward=statistics.bootstrap_mean(per_task),
            pass_at={k: _over(attempts, k, statistics.pass_at_k) for k in ks},
            pass_hat={k: _over(attempts, k, statistics.pass_hat_k) for k in ks},
            prompt_tokens=sums["prompt_tokens"],
            completion_tokens=sums["completion_tokens"],
            calls=sums["calls"],
            wall_s=self._wall[name],
            cost=None
            if price is None
            else (sums["prompt_tokens"] * price.prompt + sums["completion_tokens"] * price.completion) / 1e6,
        )


def _over(attempts: Mapping[str, tuple[int, int]], k: int, estimate: statistics.PassEstimate) -> Interval:
    """Mean over the tasks that have at least k scored attempts; one task alone gets Wilson's interval at k = 1."""
    usable = [(n, c) for n, c in attempts.values() if n >= k]
    if len(usable) == 1 and k == 1:
        return statistics.wilson(usable[0][1], usable[0][0])
    return statistics.bootstrap_mean([estimate(n, c, k) for n, c in usable])


def line_name(rollout: Rollout) -> str:
    """The agent, and the policy's name where the run compares several."""
    policy = rollout.labels.get("policy")
    return f"{rollout.agent} / {policy}" if policy else rollout.agent


def summarise(run_id: str, rollouts: Iterable[Rollout], prices: Mapping[str, Price] | None = None) -> Report:
    tally = Tally(run_id, prices)
    for rollout in rollouts:
        tally.add(rollout)
    return tally.report()


async def summarise_stream(
    run_id: str, rollouts: AsyncIterable[Rollout], prices: Mapping[str, Price] | None = None
) -> Report:
    tally = Tally(run_id, prices)
    async for rollout in rollouts:
        tally.add(rollout)
    return tally.report()


def text(report: Report) -> str:
    """The report as a terminal shows it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=240, no_color=True, highlight=False)
    console.print(
        f"run {report.run_id}: {report.tasks} tasks, {report.attempts} attempts, {report.scored} scored, "
        f"{report.attempts - report.scored} without a reward"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    ks = sorted({k for line in report.lines for k in line.pass_at})
    heads = ["agent", "attempts", "reward [95 %]", *(f"pass@{k}" for k in ks), "calls", "tokens in", "out", "wall s"]
    money = any(line.cost is not None for line in report.lines)
    for head in [*heads, *(["cost"] if money else [])]:
        table.add_column(head, justify="left" if head == "agent" else "right", no_wrap=True)
    for line in report.lines:
        cells = [line.name, f"{line.scored}/{line.attempts}", _shown(line.reward)]
        cells += [_shown(line.pass_at[k]) if k in line.pass_at else "-" for k in ks]
        cells += [str(line.calls), str(line.prompt_tokens), str(line.completion_tokens), f"{line.wall_s:.1f}"]
        cells += [f"{line.cost:.4f}" if line.cost is not None else "-"] if money else []
        table.add_row(*cells)
    console.print(table)
    if report.stages:
        parts = ", ".join(f"{name} {mid:.2f}" for name, (mid, _) in report.stages.items())
        console.print(f"median seconds by stage: {parts}")
    if report.groups.groups:
        found = report.groups
        console.print(f"groups: {found.groups}, without variance {found.zero_variance} (all solved {found.all_solved})")
    for boundary, causes in report.failures.items():
        listing = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
        console.print(f"failed at {boundary}: {listing}")
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines() if line.strip())


def _shown(interval: Interval) -> str:
    if interval.value is None:
        return "-"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
