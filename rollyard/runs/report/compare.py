"""Two sides on the same tasks, task by task: which is better, where outcomes flipped, and whether chance explains it.

A side is a run, or one agent or policy of a run: `RUN`, `RUN@codex`, `RUN@small`, `RUN@codex / small`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, islice

import msgspec

from rollyard.core.errors import ConfigError, StoreError, UnknownName
from rollyard.core.numbers import count
from rollyard.runs.report.statistics import Paired, compare_pairs
from rollyard.store import Store
from rollyard.store.values import RolloutRow, line_name

_MOST = 45  # pairs of a report: those of ten lines
Attempts = Mapping[str, Sequence[RolloutRow]]  # by task


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`pairs` names for each shared task a rollout of each side, such that their rewards differ where any do."""

    paired: Paired
    pairs: Mapping[str, tuple[str, str]]


async def compare(store: Store, first: str, second: str) -> Comparison:
    """Only scored attempts count; tasks that one side lacks are listed, not guessed."""
    before, after = await _attempts(store, first), await _attempts(store, second)
    paired = compare_pairs(_rewards(before), _rewards(after))
    if not paired.tasks:
        raise ConfigError(
            f"{first} and {second} share no task with a score",
            hint="compare runs of the same tasks; `rollyard list RUN` shows them",
        )
    pairs = {task: _differing_pair(before[task], after[task]) for task, _, _ in paired.means}
    return Comparison(paired=paired, pairs=pairs)


async def _attempts(store: Store, side: str) -> Attempts:
    run_id, line = await _find_side(store, side)
    rows = await store.lines(run_id)
    if line:
        known = {name for row in rows for name in (line_name(row), row.agent, row.policy) if name}
        if line not in known:
            raise UnknownName(f"agent or policy of run {run_id}", line, sorted(known))
        rows = [row for row in rows if line in (line_name(row), row.agent, row.policy)]
    found: dict[str, list[RolloutRow]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            found[row.task_id].append(row)
    return found


async def _find_side(store: Store, side: str) -> tuple[str, str]:
    """A run, and what follows the `@`."""
    line = ""
    try:
        kind, found = await store.resolve(side)
    except StoreError:
        run, _, line = side.partition("@")
        if not line:
            raise
        kind, found = await store.resolve(run)
    if kind != "run":
        raise ConfigError(f"{side!r} is a rollout; compare takes runs", hint="a run, or RUN@AGENT or RUN@POLICY")
    return found, line.strip()


def _rewards(attempts: Attempts) -> dict[str, list[float]]:
    return {task: [row.reward for row in rows if row.reward is not None] for task, rows in attempts.items()}


def _differing_pair(before: Sequence[RolloutRow], after: Sequence[RolloutRow]) -> tuple[str, str]:
    for one in before:
        for other in after:
            if one.reward != other.reward:
                return one.id, other.id
    return before[0].id, after[0].id


def text(first: str, second: str, found: Paired) -> str:
    low, high = found.difference.low, found.difference.high
    ends = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    lines = [
        f"{second} against {first}: {count(found.tasks, 'shared task')}",
        f"mean reward {found.difference.value:+.3f}{ends}, p = {found.p_value:.3g}",
        f"better on {len(found.better)}, worse on {len(found.worse)}",
    ]
    lines += [f"  flipped: {task}  {before:.2f} -> {after:.2f}" for task, before, after in found.flips]
    for name, only in ((first, found.only_first), (second, found.only_second)):
        if only:
            lines.append(f"only in {name}: {', '.join(only)}")
    return "\n".join(lines) + "\n"


class LinePair(msgspec.Struct, frozen=True, kw_only=True):
    """Two lines of one report against each other, on the tasks that both scored."""

    first: str
    second: str
    paired: Paired


def compare_lines(rows: Sequence[RolloutRow]) -> tuple[LinePair, ...]:
    """Each pair of agents (and policies) of a run; at most `_MOST` of them."""
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.reward is not None:
            rewards[line_name(row)][row.task_id].append(row.reward)
    pairs = islice(combinations(sorted(rewards), 2), _MOST)
    found = (LinePair(first=a, second=b, paired=compare_pairs(rewards[a], rewards[b])) for a, b in pairs)
    return tuple(pair for pair in found if pair.paired.tasks)
