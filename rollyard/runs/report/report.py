"""The statistics of a run as one frozen value, and that value as text.

Tasks, not attempts, are resampled for intervals. An attempt without a reward is counted under its failure and nowhere else.
Cost appears only where the run's config has prices.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec
from anyio import to_thread

from rollyard.core import html
from rollyard.core.failure_groups import FailureGroup, group_failures
from rollyard.core.numbers import count
from rollyard.core.printable import printable
from rollyard.core.rollout import MergeCounts, Rollout
from rollyard.runs.report import statistics
from rollyard.runs.report.spending import Price, Prices, cost, money
from rollyard.runs.report.statistics import Groups, Interval
from rollyard.runs.report.tree import draw_tree
from rollyard.store import Store
from rollyard.store.data_frames import pandas_frame, polars_frame
from rollyard.store.values import RolloutRow, RunInfo, line_name, row_of
from rollyard.trajectory.value_tree import TreeLeaf, TreeNode, leaf_of, tree_nodes

if TYPE_CHECKING:
    import pandas
    import polars  # pyright: ignore[reportMissingImports]
    from rich.console import Console

SOLVED = 1.0
INVALID = "invalid"  # the label of a rollout whose reward cannot be trusted: `rollyard scan` gives it, and people may


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
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
    merged: MergeCounts | None = None  # None where no tokens were captured
    calls_per_row: float | None = None
    # Part of the rows' tokens that a trainer need not compute, where it trains on trees
    saved_by_tree: float | None = None
    invalid: int = 0  # scored attempts whose reward cannot be trusted
    reward_valid: Interval | None = None  # the mean without them, where there are some


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    tasks: int
    attempts: int
    scored: int
    lines: tuple[ReportRow, ...]
    rewards: dict[str, int]  # histogram: lower edge of a tenth -> attempts; "unscored" apart
    stages: dict[str, tuple[float, float]]  # stage -> median and total seconds
    failures: dict[str, dict[str, int]]  # boundary -> cause -> attempts
    statuses: dict[str, int]
    groups: Groups
    currency: str = ""  # of every cost, as the run names it
    owed: int = 0  # attempts that are still to be run
    failure_groups: tuple[FailureGroup, ...] = ()  # the failures by what they say, the most frequent first
    stopped: dict[str, str] = {}  # policies that were asked no more -> what their servers said
    branch: str | None = None  # ROLLOUT@CALL that all its rollouts branch off
    replayed: int = 0  # calls that were answered as the parent's were
    nodes: tuple[TreeNode, ...] = ()  # the branch points between its rollouts, and what each is worth
    tree: tuple[str, ...] = ()  # the same, drawn
    pinned: int = 0  # rollouts that differ from the parent in clock and ids, and were given its words

    @property
    def cost(self) -> float | None:
        """Of all lines that have a price."""
        known = [line.cost for line in self.lines if line.cost is not None]
        return sum(known) if known else None

    def __str__(self) -> str:
        return text(self)

    def rows(self) -> list[dict[str, Any]]:
        """One for each agent (and policy): its fields, with intervals as `NAME`, `NAME_low` and `NAME_high`."""
        return [_flat(line) for line in self.lines]

    def to_pandas(self) -> pandas.DataFrame:
        rows = self.rows()
        return pandas_frame(rows, list(dict.fromkeys(name for row in rows for name in row)))

    def to_polars(self) -> polars.DataFrame:
        rows = self.rows()
        return polars_frame(rows, list(dict.fromkeys(name for row in rows for name in row)))

    def _repr_html_(self) -> str:
        """In a notebook."""
        names, scores, spent = _columns(self.lines, self.currency)
        head, *rows = zip(names, *scores, *spent, strict=True)
        said = f"run {self.run_id}: {_size(self)}"
        failed = [(group.count, group.boundary, group.message) for group in self.failure_groups]
        failures = [html.fold(f"{len(failed)} kinds of failure", html.table((), failed))] if failed else []
        return html.block(html.line(said), html.table(head, rows), *failures)


# A field of `MergeCounts`, and where a rollout's line has it
_MERGED = {
    "calls": "merged_calls",
    "rows": "merged_rows",
    "call_tokens": "call_tokens",
    "row_tokens": "row_tokens",
    "tree_tokens": "tree_tokens",
}
KS = (1, 2, 4, 8, 16, 32, 64)


class Tally:
    """Takes rollouts, or their lines in a list, one at a time, so that a run of any size is summed in bounded memory."""

    def __init__(self, run_id: str, prices: Prices | None = None, *, ks: Sequence[int] = KS) -> None:
        self.run_id = run_id
        self.owed = 0
        self.currency = ""
        self.failure_groups: tuple[FailureGroup, ...] = ()
        self.stopped: dict[str, str] = {}
        self.branch: str | None = None
        self.replayed = self.pinned = 0
        self.leaves: list[TreeLeaf] = []
        self.invalid: Collection[str] = ()  # rollouts, set before any is counted
        self._valid: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._prices, self._ks = prices or {}, ks
        self._rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._tasks: dict[str, set[str]] = defaultdict(set)
        self._sums: dict[str, Counter[str]] = defaultdict(Counter)
        self._merged: dict[str, Counter[str]] = defaultdict(Counter)
        self._wall: dict[str, float] = defaultdict(float)
        self._costs: dict[str, float] = {}
        self._histogram: Counter[str] = Counter()
        self._stages: dict[str, list[float]] = defaultdict(list)
        self._failures: dict[str, Counter[str]] = defaultdict(Counter)
        self._statuses: Counter[str] = Counter()

    def add(self, rollout: Rollout) -> None:
        self.count(row_of(rollout))
        for stage in rollout.stages:
            self._stages[stage.name].append(stage.duration_s)
        if (failure := rollout.failure) is not None:
            said = FailureGroup(boundary=failure.boundary, cause=failure.cause, message=failure.message, count=1)
            self.failure_groups = group_failures((*self.failure_groups, said))

    def count(self, row: RolloutRow) -> None:
        """A line alone: all but the time by stage."""
        name = line_name(row)
        self._tasks[name].add(row.task_id)
        sums = self._sums[name]
        sums["attempts"] += 1
        sums["calls"] += row.calls
        sums["prompt_tokens"] += row.prompt_tokens or 0
        sums["completion_tokens"] += row.completion_tokens or 0
        self._wall[name] += row.wall_s
        if row.merged_rows is not None:
            self._merged[name].update({field: getattr(row, column) for field, column in _MERGED.items()})
        spent = cost(self._prices, row)
        if spent is not None:
            self._costs[name] = self._costs.get(name, 0.0) + spent
        self._statuses[row.status] += 1
        if row.reward is None:
            self._histogram["unscored"] += 1
        else:
            self._rewards[name][row.task_id].append(row.reward)
            if row.id not in self.invalid:
                self._valid[name][row.task_id].append(row.reward)
            self._histogram[f"{min(int(row.reward * 10), 10) / 10:.1f}"] += 1
        if row.boundary is not None:
            self._failures[row.boundary][row.cause or "unknown"] += 1

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
            currency=self.currency,
            owed=self.owed,
            failure_groups=self.failure_groups,
            stopped=self.stopped,
            branch=self.branch,
            replayed=self.replayed,
            pinned=self.pinned,
            nodes=tree_nodes(self.leaves),
            tree=tuple(draw_tree(self.leaves)),
        )

    def _line(self, name: str) -> ReportRow:
        rewards, sums = self._rewards[name], self._sums[name]
        per_task = [fmean(values) for values in rewards.values()]
        attempts = {task: (len(values), sum(v >= SOLVED for v in values)) for task, values in rewards.items()}
        top = max((n for n, _ in attempts.values()), default=0)
        ks = [k for k in self._ks if k <= top]
        merged = MergeCounts(**self._merged[name]) if name in self._merged else None
        scored = sum(len(values) for values in rewards.values())
        invalid = scored - sum(len(values) for values in self._valid[name].values())
        valid_means = [fmean(values) for values in self._valid[name].values()]
        return ReportRow(
            name=name,
            tasks=len(self._tasks[name]),
            attempts=sums["attempts"],
            scored=scored,
            reward=statistics.mean_over_tasks(per_task),
            pass_at={k: _over(attempts, k, statistics.pass_at_k) for k in ks},
            pass_hat={k: _over(attempts, k, statistics.pass_hat_k) for k in ks},
            prompt_tokens=sums["prompt_tokens"],
            completion_tokens=sums["completion_tokens"],
            calls=sums["calls"],
            wall_s=self._wall[name],
            cost=self._costs.get(name),
            merged=merged,
            calls_per_row=merged.calls / merged.rows if merged is not None and merged.rows else None,
            saved_by_tree=1 - merged.tree_tokens / merged.row_tokens
            if merged is not None and merged.row_tokens
            else None,
            invalid=invalid,
            reward_valid=statistics.mean_over_tasks(valid_means) if invalid else None,
        )


def _over(attempts: Mapping[str, tuple[int, int]], k: int, estimate: statistics.PassEstimate) -> Interval:
    """Mean over the tasks that have at least k scored attempts."""
    return statistics.mean_over_tasks([estimate(n, c, k) for n, c in attempts.values() if n >= k])


def summarise(run_id: str, rollouts: Iterable[Rollout], prices: Prices | None = None) -> Report:
    tally = Tally(run_id, prices)
    for rollout in rollouts:
        tally.add(rollout)
    return tally.report()


async def report(store: Store, run_id: str) -> Report:
    """The statistics of a run, read from the store as a stream, with cost where the run's config has prices."""
    info = await store.get_run(run_id)
    tally = Tally(run_id, run_prices(info))
    tally.owed = info.attempts.get("owed", 0) + info.attempts.get("leased", 0)
    tally.stopped = await store.stopped_policies(run_id)
    tally.branch = info.config.get("branch")
    tally.currency = info.config.get("currency", "")
    tally.invalid = await store.find_labelled(run_id, INVALID)
    async for rollout in store.rollouts(run_id):
        tally.add(rollout)
        tally.replayed += rollout.replayed
        tally.pinned += rollout.pinned > 0
        if info.config.get("tree") is not None:
            tally.leaves.append(leaf_of(rollout))
    tally.failure_groups = await store.failures(run_id)
    return await to_thread.run_sync(tally.report)


def run_prices(info: RunInfo) -> Prices:
    return msgspec.convert(info.config.get("prices", {}), dict[str, Price])


def text(report: Report, width: int = 240) -> str:
    """The report as a terminal of that many columns shows it."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    console.print(
        f"run {report.run_id}: {_size(report)}"
        + (f", {report.attempts - report.scored} without a reward" if report.attempts > report.scored else "")
        + (f", {report.owed} still owed" if report.owed else "")
    )
    if report.branch is not None:
        pinned = f"; {report.pinned} rollouts in the parent's words (pinned)" if report.pinned else ""
        console.print(f"branches off {report.branch}: {count(report.replayed, 'call')} answered as its were{pinned}")
    names, scores, spent = _columns(report.lines, report.currency)
    if sum(map(_column_width, (names, *scores, *spent))) <= width:
        _print_columns(console, names, [*scores, *spent])
    else:
        _print_columns(console, names, scores)
        _print_columns(console, names, spent)
    if report.stages:
        parts = ", ".join(f"{name} {mid:.2f}" for name, (mid, _) in report.stages.items())
        console.print(f"median seconds by stage: {parts}")
    if report.groups.groups:
        found = report.groups
        console.print(
            f"groups of attempts: {found.groups}, {found.zero_variance} with equal rewards ({found.all_solved} all solved)"
        )
    for boundary, causes in report.failures.items():
        listing = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
        console.print(f"failed at {boundary}: {listing}")
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    for group in report.failure_groups:
        lines += textwrap.wrap(
            f"{group.count} x {printable(group.message)}", width, initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    lines += report.tree
    for policy, said in report.stopped.items():
        name = f"policy {policy!r}" if policy else "the policy"
        lines.append(f"stopped: {name} failed alike again and again and was asked no more; it said: {printable(said)}")
    return "".join(f"{line}\n" for line in lines)


def _size(report: Report) -> str:
    return f"{count(report.tasks, 'task')}, {count(report.attempts, 'attempt')}, {report.scored} scored"


def _flat(line: ReportRow) -> dict[str, Any]:
    """A line whose every field is one value."""
    intervals = {"reward": line.reward}
    if line.reward_valid is not None:
        intervals["reward_valid"] = line.reward_valid
    intervals |= {f"pass@{k}": found for k, found in line.pass_at.items()}
    intervals |= {f"pass^{k}": found for k, found in line.pass_hat.items()}
    fields: dict[str, Any] = {"name": line.name, "tasks": line.tasks, "attempts": line.attempts, "scored": line.scored}
    for name, found in intervals.items():
        fields |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    rest = (
        "invalid",
        "prompt_tokens",
        "completion_tokens",
        "calls",
        "wall_s",
        "cost",
        "calls_per_row",
        "saved_by_tree",
    )
    return {**fields, **{name: getattr(line, name) for name in rest}}


Column = list[str]


def _columns(lines: Sequence[ReportRow], currency: str) -> tuple[Column, list[Column], list[Column]]:
    """What each line is about, how well it did, and what that took. A column's head comes first."""
    names = ["agent", *(line.name for line in lines)]
    scores = [
        ["attempts", *(f"{line.scored}/{line.attempts}" for line in lines)],
        ["reward [95 %]", *(_interval_text(line.reward) for line in lines)],
    ]
    if any(line.invalid for line in lines):
        scores.append(["invalid", *(str(line.invalid) for line in lines)])
        scores.append(["reward without", *(_interval_text(line.reward_valid or line.reward) for line in lines)])
    for k in sorted({k for line in lines for k in line.pass_at}):
        scores.append([f"pass@{k}", *(_interval_text(line.pass_at[k]) if k in line.pass_at else "-" for line in lines)])
        if k > 1:
            hats = (_interval_text(line.pass_hat[k]) if k in line.pass_hat else "-" for line in lines)
            scores.append([f"pass^{k}", *hats])
    spent = [
        ["calls", *(str(line.calls) for line in lines)],
        ["tokens in", *(str(line.prompt_tokens) for line in lines)],
        ["out", *(str(line.completion_tokens) for line in lines)],
        ["wall s", *(f"{line.wall_s:.1f}" for line in lines)],
    ]
    if any(line.merged is not None for line in lines):
        spent.append(["calls/row", *(_number(line.calls_per_row, ".1f") for line in lines)])
        spent.append(["saved by tree", *(_number(line.saved_by_tree, ".0%") for line in lines)])
    if any(line.cost is not None for line in lines):
        spent.append(["cost", *(money(line.cost, currency) if line.cost is not None else "-" for line in lines)])
    return names, scores, spent


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_columns(console: Console, first: Column, others: Sequence[Column]) -> None:
    """One table, or several below each other where one does not fit; each begins with `first`."""
    from rich import box
    from rich.table import Table

    waiting = list(others)
    while waiting:
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column(first[0], no_wrap=True)
        chosen, room = [first], console.width - _column_width(first)
        while waiting and (len(chosen) == 1 or room >= _column_width(waiting[0])):
            chosen.append(waiting.pop(0))
            room -= _column_width(chosen[-1])
            table.add_column(chosen[-1][0], justify="right", no_wrap=True)
        for cells in zip(*(column[1:] for column in chosen), strict=True):
            table.add_row(*cells)
        console.print(table)


def _column_width(column: Column) -> int:
    return max(map(len, column)) + 3  # and the space between columns


def _interval_text(interval: Interval) -> str:
    if interval.value is None:
        return "-"
    ends = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}{ends}"
