"""The results of several seeds: held-out reward before and after as a table, and the curves of training as a plot.

python examples/grpo_llm/plot.py out/grpo_llm/*/result.json --out out/grpo_llm/curve.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

WINDOW = 3


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of 95 % around a share of `count` tries, which has a width where all failed or all succeeded."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def bounds(found: dict[str, Any]) -> tuple[float, float]:
    return interval(found["reward"], found["rollouts"])


def apart(result: dict[str, Any]) -> bool:
    """Whether the interval after training lies above the one before."""
    return bounds(result["before"])[1] < bounds(result["after"])[0]


def table(results: Sequence[dict[str, Any]]) -> str:
    """In Markdown, intervals of 95 %."""
    lines = [
        "| seed | held-out before | held-out after | intervals apart | steps | rollouts | largest gap | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda one: one["options"]["seed"]):
        ends = (result["before"], result["after"])
        shown = [f"{e['reward']:.2f} ({bounds(e)[0]:.2f} to {bounds(e)[1]:.2f})" for e in ends]
        count = sum(point["rollouts"] for point in result["curve"])
        facts = [*shown, "yes" if apart(result) else "no", str(len(result["curve"])), str(count)]
        facts += [f"{result['gap_max']:.0e}", f"{result['seconds']:.0f}"]
        lines.append(f"| {result['options']['seed']} | {' | '.join(facts)} |")
    return "\n".join(lines)


def smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, n - WINDOW + 1) : n + 1]) for n in range(len(values))]


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Training as lines; at both ends the held-out reward with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for number, result in enumerate(sorted(results, key=lambda one: one["options"]["seed"])):
        line = smooth([point["reward"] for point in result["curve"]])
        colour = f"C{number}"
        axes.plot(line, color=colour, label=f"seed {result['options']['seed']}", linewidth=1.5)
        for at, found in ((-1.5, result["before"]), (len(line) + 0.5, result["after"])):
            low, high = bounds(found)
            spread = [[max(0.0, found["reward"] - low)], [max(0.0, high - found["reward"])]]
            axes.errorbar([at + 0.4 * number], [found["reward"]], yerr=spread, color=colour, fmt="o", capsize=3)
    first = results[0]["options"]
    axes.set(
        xlabel=f"step ({first['prompts'] * first['group']} real rollouts each); points: held-out chores before and after",
        ylabel=f"mean reward, last {WINDOW} steps",
        ylim=(0, 1.02),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result.json of each seed")
    parser.add_argument("--out", type=Path, default=Path("out/grpo_llm/curve.png"))
    given = parser.parse_args()
    results = [json.loads(path.read_text()) for path in given.results]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(results, given.out)
    print(table(results))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
