"""The one table of every budget: what is over is told and makes the exit code, what is slower than last time is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import figures
from bench.figures import Figure, Machine, Recorded

ROOT = Path(__file__).parents[1]


def last(bench: str, **values: float) -> dict[str, Recorded]:
    return {bench: Recorded(Machine(2, "3.11.7", 0.2, "2026-01-01"), values)}


def copy_of_bench(folder: Path, **benches: str) -> Path:
    (folder / "bench").mkdir()
    for name in ("__init__.py", "__main__.py", "figures.py"):
        (folder / "bench" / name).write_text((ROOT / "bench" / name).read_text())
    for name, code in benches.items():
        (folder / "bench" / f"{name}.py").write_text(code)
    return folder


def run_bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def is_running(pid: int) -> bool:
    """Not gone, and not dead and only not collected by its parent yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    noise = [Figure("relay", "ms added", 0.01, 0.3, "<=")]
    assert figures.table(noise, last("relay", **{"ms added": -0.001})).splitlines()[2].split() == [
        "ok", "ms", "added", "0.01", "<=", "0.3", "-",
    ]  # fmt: skip
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
    for one in figures.read_baseline().values():
        assert one.figures and all(isinstance(value, float | int) for value in one.figures.values())


def test_a_benchmark_nobody_knows_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gaet"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "no benchmark named gaet" in done.stderr


def test_a_benchmark_that_notes_nothing_or_cannot_run_is_in_the_table_with_its_reason(tmp_path):
    folder = copy_of_bench(
        tmp_path,
        wire="import sys; sys.exit('no luck today')",
        relay="from bench.figures import stop_here\nstop_here('it needs root')",
        tokens="from bench.figures import note\nnote('x', 1.0, 2.0)",
    )
    done = run_bench(folder, "wire", "tokens", "relay", "--record")
    assert done.returncode == 1
    table = done.stdout.partition("== every figure")[2].splitlines()
    assert table[3].split()[:2] == ["ok", "x"]
    assert [line.split(maxsplit=1) for line in table[4:5]] == [["NONE", "wire: no luck today"]]
    assert table[5] == "not run relay: it needs root"
    (kept,) = json.loads((tmp_path / "bench" / "baseline.json").read_text()).items()
    assert kept[0] == "tokens" and kept[1]["figures"] == {"x": 1.0}
    assert kept[1]["machine"].keys() == {"cores", "python", "load", "date"}
    assert run_bench(folder, "relay").returncode == 0  # what cannot run here breaks nothing
    again = run_bench(folder, "tokens")
    assert again.returncode == 0 and "1.00x" in again.stdout


def test_a_benchmark_that_takes_too_long_is_ended_with_all_that_it_started_and_the_others_are_recorded(tmp_path):
    left = "import subprocess, sys, time\nfrom pathlib import Path\n"
    left += "Path(sys.argv[0]).with_suffix('.left').write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    folder = copy_of_bench(
        tmp_path,
        wire=f"{left}time.sleep(600)",
        relay=f"{left}from bench.figures import note\nnote('y', 1.0)",  # it ends, and leaves a program that holds its output
        tokens="from bench.figures import note\nnote('x', 1.0, 2.0)",
    )
    done = run_bench(folder, "wire", "relay", "tokens", "--record", "--limit-s", "10")
    assert done.returncode == 1
    assert "NONE    wire: it took longer than 10 s" in done.stdout
    assert json.loads((folder / "bench" / "baseline.json").read_text()).keys() == {"relay", "tokens"}
    left_over = [int((folder / "bench" / f"{name}.left").read_text()) for name in ("wire", "relay")]
    assert not [pid for pid in left_over if is_running(pid)]


def test_figures_of_a_benchmark_that_broke_half_way_do_not_replace_recorded_ones_but_those_over_budget_do(tmp_path):
    two = "from bench.figures import note\nimport sys\ngood = note('a', {}, 2.0)\n{}\n"
    two += "sys.exit(0 if note('b', 1.0) and good else 1)"
    folder = copy_of_bench(tmp_path, wire=two.format(1.0, ""))
    baseline = folder / "bench" / "baseline.json"

    def recorded() -> dict[str, float]:
        return json.loads(baseline.read_text())["wire"]["figures"]

    assert run_bench(folder, "wire", "--record").returncode == 0
    (folder / "bench" / "wire.py").write_text(two.format(1.5, "raise RuntimeError('lost')"))
    done = run_bench(folder, "wire", "--record")
    assert done.returncode == 1 and recorded() == {"a": 1.0, "b": 1.0}
    assert "wire: broke after 1 figures, which are not recorded: RuntimeError: lost" in done.stdout
    (folder / "bench" / "wire.py").write_text(two.format(3.0, ""))
    done = run_bench(folder, "wire", "--record")
    assert done.returncode == 1 and recorded() == {"a": 3.0, "b": 1.0}
    assert "over budget or broken: wire" in done.stdout
    (folder / "bench" / "wire.py").write_text(two.format(1.0, "note('b', 1.0)\nraise RuntimeError('lost')"))
    done = run_bench(folder, "wire", "--record")
    assert done.returncode == 1 and recorded() == {"a": 3.0, "b": 1.0}
    assert "wire: broke after 2 figures, which are not recorded: RuntimeError: lost" in done.stdout


def test_what_was_recorded_and_is_not_measured_any_more_is_named(tmp_path):
    folder = copy_of_bench(tmp_path, wire="from bench.figures import note\nnote('a', 1.0)\nnote('b', 1.0)")
    run_bench(folder, "wire", "--record")
    (folder / "bench" / "wire.py").write_text("from bench.figures import note\nnote('a', 1.0)")
    done = run_bench(folder, "wire")
    assert done.returncode == 0
    assert "wire, in part: recorded, and not measured now: b\n" in done.stdout


def test_a_benchmark_with_a_command_of_its_own_is_named_with_it():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "large_store"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2 and "python -m bench.large_store" in done.stderr


def test_a_run_that_is_ended_shows_what_it_knows_and_leaves_nothing_running(tmp_path):
    folder = copy_of_bench(
        tmp_path,
        tokens="from bench.figures import note\nnote('x', 1.0, 2.0)",
        wire="import os, time\nfrom pathlib import Path\nPath('pid').write_text(str(os.getpid()))\ntime.sleep(600)",
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "bench", "tokens", "wire", "--record"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "x" in said.partition("== every figure")[2] and "wire: it was ended" in said
    assert not is_running(int((folder / "pid").read_text()))
    assert json.loads((folder / "bench" / "baseline.json").read_text()).keys() == {"tokens"}


@pytest.mark.parametrize("name", ["cold_start", "wire", "writer"])
def test_a_benchmark_without_options_says_so_and_measures_nothing(name):
    command = [sys.executable, "-m", f"bench.{name}"]
    asked, wrong = (
        subprocess.run([*command, word], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        for word in ("--help", "--nonsuch")
    )
    assert (asked.returncode, wrong.returncode) == (0, 2)
    assert asked.stdout.startswith("usage:") and "unrecognized arguments: --nonsuch" in wrong.stderr
