"""Two runs on the same tasks, task by task: who is better, where outcomes flipped, and whether chance explains it."""

from __future__ import annotations

from collections import defaultdict

from rollyard.core.errors import ConfigError
from rollyard.runs.report.statistics import Paired, compare_pairs
from rollyard.store import Store


async def compare(store: Store, first: str, second: str) -> Paired:
    """Only scored attempts count; tasks that one run lacks are listed, not guessed."""
    found = compare_pairs(await _rewards(store, first), await _rewards(store, second))
    if not found.tasks:
        raise ConfigError(f"runs {first} and {second} share no task with a score")
    return found


async def _rewards(store: Store, run: str) -> dict[str, list[float]]:
    kind, run_id = await store.resolve(run)
    if kind != "run":
        raise ConfigError(f"{run!r} is a rollout; compare takes two runs")
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in await store.lines(run_id):
        if row.reward is not None:
            rewards[row.task_id].append(row.reward)
    return rewards


def text(first: str, second: str, found: Paired) -> str:
    low, high = found.difference.low, found.difference.high
    ends = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    lines = [
        f"{second} against {first}: {found.tasks} shared tasks",
        f"mean reward {found.difference.value:+.3f}{ends}, p = {found.p_value:.3g}",
        f"better on {len(found.better)}, worse on {len(found.worse)}",
    ]
    lines += [f"  flipped: {task}  {before:.2f} -> {after:.2f}" for task, before, after in found.flips]
    for name, only in ((first, found.only_first), (second, found.only_second)):
        if only:
            lines.append(f"only in {name}: {', '.join(only)}")
    return "\n".join(lines) + "\n"
