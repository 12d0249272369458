"""Learning curves of several seeds: by how much each rose, as a table and as a plot with the spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

FIRST, LAST, WINDOW = 6, 15, 5


def rewards(result: dict[str, Any]) -> list[float]:
    """The mean reward of every step that had one."""
    return [point["reward"] for point in result["curve"] if point["reward"] is not None]


def ends(result: dict[str, Any]) -> tuple[float, float]:
    """Mean reward of the first six steps and of the last fifteen; a shorter run is halved."""
    found = rewards(result)
    half = max(1, len(found) // 2)
    return fmean(found[: min(FIRST, half)]), fmean(found[-min(LAST, half) :])


def smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, n - WINDOW + 1) : n + 1]) for n in range(len(values))]


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"seed  first {FIRST}  last {LAST}   rise  minutes"]
    for result in results:
        if rewards(result):
            first, last = ends(result)
            numbers = f"{first:7.2f}  {last:7.2f}  {last - first:+.2f}  {result['seconds'] / 60:7.1f}"
        else:
            numbers = "no rollout had a reward"
        lines.append(f"{result['seed']:4d}  {numbers}")
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path, *, rollouts: int) -> None:
    """Each seed as a thin line, their mean as a thick one, and between the lowest and the highest seed a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    lines = [smooth(rewards(result)) for result in results]
    many = len(lines) > 1
    for result, line in zip(results, lines, strict=True):
        axes.plot(line, label=f"seed {result['seed']}", linewidth=1 if many else 2)
    if many:
        columns = list(zip(*lines, strict=False))  # to the end of the shortest
        steps = range(len(columns))
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color="0.85", zorder=0)
        axes.plot(steps, [fmean(c) for c in columns], color="black", linewidth=2.5, label="mean")
    axes.set(xlabel=f"step ({rollouts} real rollouts each)", ylabel=f"mean reward, last {WINDOW} steps", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower right")
    figure.savefig(path, dpi=110)
