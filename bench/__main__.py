"""`python -m bench [NAME ...]`: run the benchmarks one after the other, each in a process of its own and in its quick form, then
print every figure with its budget and its ratio to the last recorded run. One that cannot run here says why in one line.
`--record` makes this run the recorded one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench import figures

# by name: the options of the quick form. The whole takes about 10 minutes on two quiet cores.
BENCHES: dict[str, tuple[str, ...]] = {
    "gate": ("--quick",),
    "sandbox": ("--samples", "40"),
    "rollouts": ("--count", "160"),
    "sigkill": (),
    "hosted": (),
    "envs": ("--rounds", "3"),
    "plane": ("--seconds", "3"),
    "store": (),
    "page": ("--repeat", "3"),
    "density": ("--count", "2"),
    "cold_start": (),
    "relay": ("--rounds", "3"),
    "wire": (),
    "tokens": (),
}
LIMIT_S = 900.0  # of one benchmark, on a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--full", action="store_true", help="each with its own defaults: longer, steadier")
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {figures.BASELINE.name}")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(BENCHES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    machine, began = figures.read_machine(), time.monotonic()
    not_run: dict[str, str] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as folder:
        where = Path(folder) / "figures"
        for name in asked.names or BENCHES:
            print(f"\n== {name}", flush=True)
            code, said = run(name, () if asked.full else BENCHES[name], where)
            noted = any(figure.bench == name for figure in figures.read(where))
            if code == figures.NOT_HERE or not noted:
                not_run[name] = said
            if code not in (0, figures.NOT_HERE) or (code == 0 and not noted):
                failed.append(name)
        found = figures.read(where)
    before = figures.recorded()
    took = f"{(time.monotonic() - began) / 60:.1f} minutes"
    print(f"\n== every figure ({machine}; {took})\n{figures.table(found, before)}")
    for name, why in not_run.items():
        print(f"{'NONE' if name in failed else 'not run':8}{name}: {why}")
    if asked.record:
        figures.record(found, machine, before)
    if failed:
        print(f"\nover budget or broken: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, options: tuple[str, ...], where: Path) -> tuple[int, str]:
    """Its exit code, and the last that it said."""
    environment = {**os.environ, figures.VARIABLE: str(where), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", f"bench.{name}", *options]
    last = "it said nothing"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        ended_by_us = threading.Event()

        def end() -> None:
            ended_by_us.set()
            process.terminate()

        limit = threading.Timer(LIMIT_S, end)
        limit.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
            code = process.wait()
        finally:
            limit.cancel()
    return (code or 1, f"it took longer than {LIMIT_S:g} s") if ended_by_us.is_set() else (code, last)


if __name__ == "__main__":
    sys.exit(main())
