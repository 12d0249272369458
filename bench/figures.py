"""The figures that benchmarks answer for: each is printed against its budget and, under `python -m bench`, joins one table with
the ratio to the last recorded run (`bench/baseline.json`), in which what became worse is marked.

A record says on what machine each benchmark ran, and how busy that was: ratios between different machines say little.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

BASELINE = Path(__file__).with_name("baseline.json")
VARIABLE = "ROLLYARD_BENCH_FIGURES"  # the file that `python -m bench` collects them in
NOISE = 1.25  # how many times worse than recorded a figure may be before it is marked
NOT_HERE = 77  # the exit code of a benchmark that cannot run on this machine; its last line says why


class Figure(NamedTuple):
    """`sense` is `<=` or `>=` for a budget, `goal` for a bound from below that is wished for, `less` or `more` for what is
    better where there is no bound."""

    bench: str
    name: str
    value: float
    bound: float | None = None
    sense: str = "less"

    @property
    def good(self) -> bool:
        """Within its budget; a goal that is missed breaks nothing."""
        return self.word in ("ok", "missed", "")

    @property
    def word(self) -> str:
        if self.bound is None:
            return ""
        within = self.value <= self.bound if self.sense == "<=" else self.value >= self.bound
        return "ok" if within else "missed" if self.sense == "goal" else "OVER"

    @property
    def wanted(self) -> str:
        return "" if self.bound is None else f"{'goal' if self.sense == 'goal' else self.sense} {self.bound:g}"

    def is_worse(self, last: float | None) -> bool:
        """Than what was recorded, by more than chance does."""
        if last is None or last < 0:  # of what is all but nothing chance may make less than nothing
            return False
        if self.sense in ("<=", "less"):
            return self.value > last * NOISE
        return self.value * NOISE < last


class Machine(NamedTuple):
    """Where and when a benchmark ran; `load` is how many programs wanted a core in the minute before."""

    cores: int
    python: str
    load: float
    date: str

    def __str__(self) -> str:
        return f"{self.cores} cores, Python {self.python}, load {self.load:.1f}, {self.date}"


class Recorded(NamedTuple):
    """What one benchmark gave when it was recorded."""

    machine: Machine
    figures: Mapping[str, float]


def read_machine() -> Machine:
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, platform.python_version(), round(os.getloadavg()[0], 1), time.strftime("%Y-%m-%d"))


def note(name: str, value: float, bound: float | None = None, sense: str | None = None) -> bool:
    """Print it, keep it for the table, and say whether it is within its budget."""
    bench = Path(sys.argv[0]).stem
    figure = Figure(bench, name, round(float(value), 4), bound, sense or ("less" if bound is None else "<="))
    print(f"{figure.word:7}{name:50}{figure.value:10.2f}  {figure.wanted}".rstrip(), flush=True)
    if where := os.environ.get(VARIABLE):
        with Path(where).open("a") as file:
            file.write(json.dumps(figure) + "\n")
    return figure.good


def stop_here(why: str) -> NoReturn:
    """For a benchmark that cannot run on this machine."""
    print(why, flush=True)
    sys.exit(NOT_HERE)


def read(where: Path) -> list[Figure]:
    return [Figure(*json.loads(line)) for line in where.read_text().splitlines()] if where.exists() else []


def read_baseline() -> dict[str, Recorded]:
    if not BASELINE.exists():
        return {}
    kept: dict[str, Any] = json.loads(BASELINE.read_text())
    return {bench: Recorded(Machine(**one["machine"]), one["figures"]) for bench, one in kept.items()}


def record(figures: Iterable[Figure], machine: Machine) -> None:
    """The figures of these benchmarks in the place of their last ones; those of the others stay."""
    found: dict[str, dict[str, float]] = {}
    for figure in figures:
        found.setdefault(figure.bench, {})[figure.name] = figure.value
    kept = read_baseline() | {bench: Recorded(machine, values) for bench, values in found.items()}
    plain = {bench: {"machine": one.machine._asdict(), "figures": one.figures} for bench, one in sorted(kept.items())}
    BASELINE.write_text(json.dumps(plain, indent=2) + "\n")


def table(figures: Iterable[Figure], before: Mapping[str, Recorded]) -> str:
    """Verdict, value, budget and ratio to the recorded run, one line each, in 80 columns; figures that became worse are listed
    again below."""
    lines = [f"{'':7}{'figure':42} {'value':>9}  {'budget':10}{'to last':>8}"]
    worse: list[str] = []
    bench = ""
    for figure in figures:
        if figure.bench != bench:
            bench = figure.bench
            lines.append(bench)
        last = before[bench].figures.get(figure.name) if bench in before else None
        ratio = (
            "new"
            if last is None
            else f"{figure.value / last:.2f}x"
            if last > 0
            else "same"
            if figure.value == last
            else "-"
        )
        word = figure.word
        if figure.is_worse(last):
            word = word if word == "OVER" else "WORSE"
            worse.append(f"  {bench}: {figure.name}: {last:g} -> {figure.value:g}")
        lines.append(f"{word:7}{figure.name[:42]:42} {figure.value:9.2f}  {figure.wanted:10}{ratio:>8}")
    if worse:
        lines += ["", f"worse than recorded by more than {NOISE - 1:.0%}:", *worse]
        lines += [f"  ({name} was recorded with {before[name].machine})" for name in _benches(worse)]
    return "\n".join(lines)


def _benches(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(line.split(":")[0].strip() for line in lines))
