"""`python -m bench [NAME ...]`: run the benchmarks one after the other, each in a process of its own, then print every figure
with its budget and its ratio to the last recorded run. `--record` makes this run the recorded one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import figures

BENCHES = ("sandbox", "relay", "wire", "tokens", "store", "gate", "envs", "rollouts", "density", "page", "plane")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {figures.BASELINE.name}")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(BENCHES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as folder:
        where = Path(folder) / "figures"
        for name in asked.names or BENCHES:
            print(f"\n== {name}", flush=True)
            environment = {**os.environ, figures.VARIABLE: str(where)}
            if subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False, env=environment).returncode:
                failed.append(name)
        found = figures.read(where)
    before = figures.recorded()
    silent = {*(asked.names or BENCHES)} - {figure.bench for figure in found}
    print(f"\n== every figure\n{figures.table(found, before)}")
    for name in sorted(silent):
        print(f"{'NONE':12}{name:12}it noted no figure: see its output above")
    if asked.record:
        figures.record(found, before)
    if failed:
        print(f"\nover budget or broken: {', '.join(failed)}")
    return 1 if failed or silent else 0


if __name__ == "__main__":
    sys.exit(main())
