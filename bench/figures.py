"""The figures that benchmarks answer for: each is printed against its budget and, under `python -m bench`, joins one table with
the ratio to the last recorded run (`bench/baseline.json`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

BASELINE = Path(__file__).with_name("baseline.json")
VARIABLE = "ROLLYARD_BENCH_FIGURES"  # the file that `python -m bench` collects them in


class Figure(NamedTuple):
    """`sense` is `<=` or `>=` for a budget, `goal` for a bound from below that is wished for, empty for none."""

    bench: str
    name: str
    value: float
    bound: float | None = None
    sense: str = ""

    @property
    def key(self) -> str:
        return f"{self.bench}: {self.name}"

    @property
    def good(self) -> bool:
        """Within its budget; a goal that is missed breaks nothing."""
        return self.word in ("ok", "not reached", "")

    @property
    def word(self) -> str:
        if self.bound is None:
            return ""
        within = self.value <= self.bound if self.sense == "<=" else self.value >= self.bound
        return "ok" if within else "not reached" if self.sense == "goal" else "OVER"

    @property
    def wanted(self) -> str:
        return "" if self.bound is None else f"{'goal >=' if self.sense == 'goal' else self.sense} {self.bound:g}"


def note(name: str, value: float, bound: float | None = None, sense: str = "<=") -> bool:
    """Print it, keep it for the table, and say whether it is within its budget."""
    bench = Path(sys.argv[0]).stem
    figure = Figure(bench, name, round(float(value), 4), bound, sense if bound is not None else "")
    print(f"{figure.word:12}{name:46} {figure.value:10.2f}   {figure.wanted}", flush=True)
    if where := os.environ.get(VARIABLE):
        with Path(where).open("a") as file:
            file.write(json.dumps(figure) + "\n")
    return figure.good


def read(where: Path) -> list[Figure]:
    return [Figure(*json.loads(line)) for line in where.read_text().splitlines()] if where.exists() else []


def recorded() -> dict[str, float]:
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def record(figures: Iterable[Figure], before: Mapping[str, float]) -> None:
    """The figures of this run in the place of the last ones; those of benchmarks that did not run stay."""
    found = dict(before) | {figure.key: figure.value for figure in figures}
    BASELINE.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")


def table(figures: Iterable[Figure], before: Mapping[str, float]) -> str:
    """One line each: value, budget, verdict, and how it stands to the recorded run."""
    lines = [f"{'':12}{'':12}{'figure':46} {'value':>10}   {'budget':14} {'to recorded':>11}"]
    for figure in figures:
        last = before.get(figure.key)
        ratio = f"{figure.value / last:10.2f}x" if last else "        new"
        lines.append(
            f"{figure.word:12}{figure.bench:12}{figure.name:46} {figure.value:10.2f}   {figure.wanted:14} {ratio}"
        )
    return "\n".join(lines)
