"""`python -m bench.cold_start`: from a wheel to the first rollout, as on a machine that never had it. The wheel is built and
installed into a new environment; then `rollyard demo` runs in a network namespace without any network, with an empty home and an
empty cache. Wall and CPU seconds of each step; the first rollout's budget is 60 s of wall time."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import note, stop_here

ROOT = Path(__file__).parents[1]
BUDGET_S = 60.0


class Took(NamedTuple):
    wall_s: float
    cpu_s: float


def run(words: Sequence[str | Path], **options: Any) -> tuple[Took, str]:
    """What it took with all of its children, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        stop_here("it needs root, or the right to make a network namespace (unshare --net)")
    with tempfile.TemporaryDirectory(prefix="ry-cold-") as name:
        folder = Path(name)
        run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT])
        (wheel,) = folder.glob("rollyard-*.whl")
        venv.create(folder / "venv", with_pip=True)
        programs, home = folder / "venv" / "bin", folder / "home"
        home.mkdir()
        pip, _ = run([programs / "pip", "install", "-q", wheel])
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLYARD_", "XDG_"))}
        env = {**kept, "HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
        demo, printed = run(["unshare", "--net", programs / "rollyard", "demo"], cwd=home, env=env)
    assert "completed, reward 1" in printed, printed
    print(f"pip install: {pip.wall_s:.1f} s, {pip.cpu_s:.1f} s of CPU, {wheel.name}")
    print(f"rollyard demo: {demo.wall_s:.1f} s, {demo.cpu_s:.1f} s of CPU\n\n{printed}")
    within = note("first rollout after pip, seconds", demo.wall_s, BUDGET_S)
    note("of it CPU, seconds", demo.cpu_s)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
