"""The tables of runs: all runs, one run's rollouts, its tasks, two runs compared. Reads only; every table is paged.

Statistics of a run come from its lines, which the database gives without bodies, and are kept until the run changes: a page of
a run of ten thousand rollouts costs what its fifty rows cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import anyio.to_thread
import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.failure_groups import FailureGroup
from rollyard.page.drawing import sparkline
from rollyard.page.query import PageQuery
from rollyard.runs.display.watch import in_flight
from rollyard.runs.report.compare import compare as compare_runs
from rollyard.runs.report.report import INVALID, Report, Tally, run_prices
from rollyard.runs.report.spending import Prices, cost
from rollyard.store import Store
from rollyard.store.values import RolloutQuery, RolloutRow, RunInfo, RunSortKey, SortKey, line_name

PAGE = 50
_PARTS = 40  # points of a run's trend
_KEPT = 32  # runs whose statistics are remembered


async def runs(store: Store, query: PageQuery) -> dict[str, Any]:
    sort: RunSortKey = query.sort(get_args(RunSortKey), "created_at")
    down, offset = query.down(default=True), query.number("offset")
    found = await store.list_runs(search=query.text("q"), sort=sort, descending=down, limit=PAGE + 1, offset=offset)
    return {
        "runs": found[:PAGE],
        "offset": offset,
        "next": offset + PAGE if len(found) > PAGE else None,
        "size": PAGE,
        "sort": sort,
        "down": down,
    }


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a run: mean reward and scored attempts by line, and over all."""

    task: str
    cells: Mapping[str, tuple[float, int]]
    attempts: int
    scored: int
    mean: float | None
    varies: bool  # some group of it has attempts with different rewards


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    report: Report
    tasks: tuple[TaskLine, ...]
    prices: Prices
    cached_tokens: int
    duration_s: float | None
    trend: tuple[float | None, ...]  # mean reward of equal parts of the run, in the order in which attempts began


class Summaries:
    """A run's statistics, computed off the event loop and again only once the run has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[tuple[RunInfo, frozenset[str]], Summary]] = {}

    async def of(self, info: RunInfo) -> Summary:
        known, invalid = self._known.get(info.id), await self._store.find_labelled(info.id, INVALID)
        if known is not None and known[0] == (info, invalid):
            return known[1]
        rows = await self._store.lines(info.id)
        failures, stopped = await self._store.failures(info.id), await self._store.stopped_policies(info.id)
        made = await anyio.to_thread.run_sync(_summary, info, rows, failures, stopped, invalid)
        self._known.pop(info.id, None)
        self._known[info.id] = (info, invalid), made
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return made


def _summary(
    info: RunInfo,
    rows: Sequence[RolloutRow],
    failures: tuple[FailureGroup, ...],
    stopped: dict[str, str],
    invalid: frozenset[str],
) -> Summary:
    prices = run_prices(info)
    tally = Tally(info.id, prices, ks=(1,))
    tally.failure_groups, tally.stopped, tally.invalid = failures, stopped, invalid
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    attempts: dict[str, int] = defaultdict(int)
    for row in rows:
        tally.count(row)
        attempts[row.task_id] += 1
        scored = groups[row.task_id][line_name(row)]
        if row.reward is not None:
            scored.append(row.reward)
    tasks = tuple(_task_line(task, attempts[task], groups[task]) for task in sorted(groups))
    begun = [row.started_at for row in rows]
    return Summary(
        report=tally.report(),
        tasks=tasks,
        prices=prices,
        cached_tokens=sum(row.cached_tokens or 0 for row in rows),
        duration_s=max(row.started_at + row.wall_s for row in rows) - min(begun) if rows else None,
        trend=_trend(rows),
    )


def _trend(rows: Sequence[RolloutRow]) -> tuple[float | None, ...]:
    """None for a part in which nothing was scored; nothing at all where there is no course to see."""
    ordered = sorted(rows, key=lambda row: row.started_at)
    parts = min(_PARTS, len(ordered))
    if parts < 3:
        return ()
    edges = [round(part * len(ordered) / parts) for part in range(parts + 1)]
    means: list[float | None] = []
    for low, high in pairwise(edges):
        scored = [row.reward for row in ordered[low:high] if row.reward is not None]
        means.append(sum(scored) / len(scored) if scored else None)
    return tuple(means)


def _task_line(task: str, attempts: int, by_line: Mapping[str, Sequence[float]]) -> TaskLine:
    everything = [reward for rewards in by_line.values() for reward in rewards]
    return TaskLine(
        task=task,
        cells={name: (sum(rewards) / len(rewards), len(rewards)) for name, rewards in by_line.items() if rewards},
        attempts=attempts,
        scored=len(everything),
        mean=sum(everything) / len(everything) if everything else None,
        varies=any(len(set(rewards)) > 1 for rewards in by_line.values()),
    )


async def run(
    store: Store, summaries: Summaries, run_id: str, task: str | None, parameters: PageQuery
) -> dict[str, Any]:
    """A run's rollouts, or those of one of its tasks."""
    info = await _info(store, run_id)
    sort: SortKey = parameters.sort(get_args(SortKey), "started_at")
    down, offset = parameters.down(), parameters.number("offset")
    query = RolloutQuery(
        run_id=info.id,
        task_id=task,
        agent=parameters.text("agent"),
        policy=parameters.text("policy"),
        status=parameters.text("status"),
        boundary=parameters.text("boundary"),
        cause=parameters.text("cause"),
        search=parameters.text("q"),
        sort=sort,
        descending=down,
        limit=PAGE,
        offset=offset,
    )
    page = await store.list_rollouts(query)
    summary = await summaries.of(info)
    return {
        **_head(info, summary),
        "page": page,
        "costs": {row.id: cost(summary.prices, row) for row in page.rows},
        "offset": offset,
        "next": page.next,
        "size": PAGE,
        "sort": sort,
        "down": down,
        "task": task,
        "flying": await in_flight(store, info) if task is None else [],
    }


_SORTS: Mapping[str, Callable[[TaskLine], Any]] = {
    "task": lambda line: line.task,
    "mean": lambda line: -1.0 if line.mean is None else line.mean,
    "attempts": lambda line: line.attempts,
}


async def tasks(store: Store, summaries: Summaries, run_id: str, query: PageQuery) -> dict[str, Any]:
    """A run task by task: the heat grid of task x agent."""
    info = await _info(store, run_id)
    summary = await summaries.of(info)
    wanted = query.text("q")
    kept = [line for line in summary.tasks if wanted is None or wanted in line.task]
    if query.text("varies"):
        kept = [line for line in kept if line.varies]
    sort, down, offset = query.sort(("task", "mean", "attempts"), "task"), query.down(), query.number("offset")
    kept.sort(key=_SORTS[sort], reverse=down)
    return {
        **_head(info, summary),
        "tasks": kept[offset : offset + PAGE],
        "total": len(kept),
        "offset": offset,
        "next": offset + PAGE if offset + PAGE < len(kept) else None,
        "size": PAGE,
        "sort": sort,
        "down": down,
    }


def _head(info: RunInfo, summary: Summary) -> dict[str, Any]:
    lines = summary.report.lines
    return {
        "run": info,
        "report": summary.report,
        "names": [line.name for line in lines],
        "prompt_tokens": sum(line.prompt_tokens for line in lines),
        "completion_tokens": sum(line.completion_tokens for line in lines),
        "cost": summary.report.cost,
        "currency": info.config.get("currency", ""),
        "cached_tokens": summary.cached_tokens,
        "duration": summary.duration_s,
        "trend": sparkline(summary.trend),
        "merged": any(line.merged is not None for line in lines),
        "invalid": any(line.invalid for line in lines),
        "agents": sorted({line.name.partition(" / ")[0] for line in lines}),
        "policies": sorted({line.name.partition(" / ")[2] for line in lines} - {""}),
    }


async def compare(store: Store, first: str, second: str) -> dict[str, Any]:
    known = await store.list_runs(limit=100)
    made = await compare_runs(store, first, second) if first and second else None
    sides = [(run, [run.id, *(f"{run.id}@{line}" for line in _lines_of(run))]) for run in known]
    if made is None:
        return {"a": first, "b": second, "found": None, "sides": sides}
    tasks = sorted(made.paired.means, key=lambda line: (line[2] - line[1], line[0]))
    return {"a": first, "b": second, "found": made.paired, "tasks": tasks, "pairs": made.pairs, "sides": sides}


def _lines_of(run: RunInfo) -> list[str]:
    """Agents and policies of a run that has several of them; two or more of both also by pair."""
    agents, policies = list(run.config.get("agents", ())), list(run.config.get("policies", ()))
    single = [*(agents if len(agents) > 1 else ()), *(policies if len(policies) > 1 else ())]
    both = len(agents) > 1 and len(policies) > 1
    return [*single, *(f"{agent} / {policy}" for agent in agents for policy in policies if both)]


async def _info(store: Store, run_id: str) -> RunInfo:
    kind, found = await store.resolve(run_id)
    if kind != "run":
        raise ConfigError(f"{run_id!r} is a rollout")
    return await store.get_run(found)
