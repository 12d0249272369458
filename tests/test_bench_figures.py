"""The one table of every budget: what is over is told and makes the exit code, what is slower than last time is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench import figures
from bench.figures import Figure

ROOT = Path(__file__).parents[1]


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
    ] == [("ok", True), ("OVER", False), ("OVER", False), ("not reached", True), ("", True)]


def test_the_table_shows_the_ratio_to_the_recorded_run():
    lines = figures.table(
        [Figure("gate", "x", 3.0, 2.0, "<="), Figure("gate", "y", 1.0)], {"gate: x": 1.5}
    ).splitlines()
    assert lines[1].split() == ["OVER", "gate", "x", "3.00", "<=", "2", "2.00x"]
    assert lines[2].split()[-1] == "new"


def test_what_a_benchmark_notes_is_collected_and_the_file_of_the_recorded_run_can_be_read(tmp_path):
    code = "import sys; sys.argv = ['bench/thing.py']\nfrom bench.figures import note\n"
    code += "sys.exit(0 if all([note('a', 1.0, 2.0), note('b', 3.0, 2.0)]) else 1)"
    kept = tmp_path / "figures"
    environment = {**os.environ, figures.VARIABLE: str(kept)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False, capture_output=True)
    assert done.returncode == 1
    assert figures.read(kept) == [Figure("thing", "a", 1.0, 2.0, "<="), Figure("thing", "b", 3.0, 2.0, "<=")]
    assert all(isinstance(value, float | int) for value in json.loads(figures.BASELINE.read_text()).values())


def test_a_benchmark_nobody_knows_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gaet"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "no benchmark named gaet" in done.stderr


def test_a_benchmark_that_notes_nothing_is_in_the_table_and_fails(tmp_path):
    (tmp_path / "bench").mkdir()
    for name in ("__init__.py", "__main__.py", "figures.py"):
        (tmp_path / "bench" / name).write_text((ROOT / "bench" / name).read_text())
    (tmp_path / "bench" / "wire.py").write_text("print('nothing to say')")
    (tmp_path / "bench" / "tokens.py").write_text("from bench.figures import note\nnote('x', 1.0, 2.0)")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "wire", "tokens", "--record"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    table = done.stdout.partition("== every figure")[2].splitlines()
    assert [line.split()[:2] for line in table[2:4]] == [["ok", "tokens"], ["NONE", "wire"]]
    assert json.loads((tmp_path / "bench" / "baseline.json").read_text()) == {"tokens: x": 1.0}
