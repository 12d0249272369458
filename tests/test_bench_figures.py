"""The one table of every budget: what is over is told and makes the exit code, what is slower than last time is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench import figures
from bench.figures import Figure, Machine, Recorded

ROOT = Path(__file__).parents[1]


def last(bench: str, **values: float) -> dict[str, Recorded]:
    return {bench: Recorded(Machine(2, "3.11.7", 0.2, "2026-01-01"), values)}


def test_a_budget_holds_from_its_own_side_and_a_goal_breaks_nothing():
    assert [
        (f.word, f.good)
        for f in (
            Figure("b", "x", 2.0, 2.0, "<="),
            Figure("b", "x", 2.1, 2.0, "<="),
            Figure("b", "x", 0.9, 1.0, ">="),
            Figure("b", "x", 0.9, 1.0, "goal"),
            Figure("b", "x", 9.0),
        )
    ] == [("ok", True), ("OVER", False), ("OVER", False), ("missed", True), ("", True)]


def test_the_table_shows_the_ratio_to_the_recorded_run_in_80_columns():
    found = [
        Figure("gate", "x", 3.0, 2.0, "<="),
        Figure("gate", "y", 1.0),
        Figure("wire", "a name" * 9, 1e5, 1e5, "goal"),
    ]
    lines = figures.table(found, last("gate", x=1.5)).splitlines()
    assert lines[1] == "gate"
    assert lines[2].split() == ["OVER", "x", "3.00", "<=", "2", "2.00x"]
    assert lines[3].split() == ["y", "1.00", "new"]
    assert max(map(len, lines)) <= 80


def test_a_figure_that_became_worse_is_marked_and_told_with_the_machine_it_was_recorded_on():
    now = [
        Figure("gate", "CPU", 1.6, 2.0, "<="),
        Figure("gate", "rate", 7.0, None, "more"),
        Figure("gate", "share", 0.7, 0.1, ">="),
        Figure("gate", "kB", 12.0),
        Figure("gate", "steady", 11.0),
    ]
    before = last("gate", CPU=1.2, rate=10.0, share=1.0, kB=8.0, steady=10.0)
    shown, _, told = figures.table(now, before).partition("worse than recorded")
    marked = [line.split()[0] for line in shown.splitlines()[2:7]]
    assert marked == ["WORSE", "WORSE", "WORSE", "WORSE", "steady"]
    assert [line.split(":")[1].strip() for line in told.splitlines()[1:5]] == ["CPU", "rate", "share", "kB"]
    assert "2 cores, Python 3.11.7, load 0.2, 2026-01-01" in told
    better = [Figure("gate", "CPU", 0.6, 2.0, "<="), Figure("gate", "rate", 20.0, None, "more")]
    assert "worse" not in figures.table(better, before).lower()


def test_what_a_benchmark_notes_is_collected_and_the_file_of_the_recorded_run_can_be_read(tmp_path):
    code = "import sys; sys.argv = ['bench/thing.py']\nfrom bench.figures import note\n"
    code += "sys.exit(0 if all([note('a', 1.0, 2.0), note('b', 3.0, 2.0)]) else 1)"
    kept = tmp_path / "figures"
    environment = {**os.environ, figures.VARIABLE: str(kept)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False, capture_output=True)
    assert done.returncode == 1
    assert figures.read(kept) == [Figure("thing", "a", 1.0, 2.0, "<="), Figure("thing", "b", 3.0, 2.0, "<=")]
    for one in figures.recorded().values():
        assert one.figures and all(isinstance(value, float | int) for value in one.figures.values())


def test_a_benchmark_nobody_knows_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gaet"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "no benchmark named gaet" in done.stderr


def test_a_benchmark_that_notes_nothing_or_cannot_run_is_in_the_table_with_its_reason(tmp_path):
    (tmp_path / "bench").mkdir()
    for name in ("__init__.py", "__main__.py", "figures.py"):
        (tmp_path / "bench" / name).write_text((ROOT / "bench" / name).read_text())
    (tmp_path / "bench" / "wire.py").write_text("import sys; sys.exit('no luck today')")
    (tmp_path / "bench" / "relay.py").write_text("from bench.figures import stop_here\nstop_here('it needs root')")
    (tmp_path / "bench" / "tokens.py").write_text("from bench.figures import note\nnote('x', 1.0, 2.0)")

    def bench(*names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bench", *names],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = bench("wire", "tokens", "relay", "--record")
    assert done.returncode == 1
    table = done.stdout.partition("== every figure")[2].splitlines()
    assert table[3].split()[:2] == ["ok", "x"]
    assert [line.split(maxsplit=1) for line in table[4:5]] == [["NONE", "wire: no luck today"]]
    assert table[5] == "not run relay: it needs root"
    (kept,) = json.loads((tmp_path / "bench" / "baseline.json").read_text()).items()
    assert kept[0] == "tokens" and kept[1]["figures"] == {"x": 1.0}
    assert kept[1]["machine"].keys() == {"cores", "python", "load", "date"}
    assert bench("relay").returncode == 0  # what cannot run here breaks nothing
    again = bench("tokens")
    assert again.returncode == 0 and "1.00x" in again.stdout
