"""`python -m bench [NAME ...]`: run the benchmarks one after the other, each in a process of its own and in its quick form, then
print every figure with its budget and its ratio to the last recorded run. One that cannot run here says why in one line; one that
breaks or takes too long is named, and the others go on. `--record` makes this run the recorded one: each benchmark's figures are
kept as soon as it has ended, unless it broke. What was recorded and is not measured now is named."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from bench import figures

# by name: the options of the quick form. The whole takes about 10 minutes on two quiet cores.
BENCHES: dict[str, tuple[str, ...]] = {
    "gate": ("--quick",),
    "sandbox": ("--samples", "40", "--live", "200"),
    "rollouts": ("--count", "160"),
    "sigkill": (),
    "hosted": (),
    "envs": ("--rounds", "3"),
    "plane": ("--seconds", "3"),
    "store": (),
    "writer": (),
    "page": ("--repeat", "3"),
    "density": ("--count", "2"),
    "cold_start": (),
    "relay": ("--rounds", "3"),
    "wire": (),
    "tokens": (),
}
# Not run by this command: they take long, or need a machine of their own, and print tables of their own.
APART = {
    "appends": "writers side by side on PostgreSQL, a minute",
    "branch": "every agent many times, a quarter of an hour",
    "drift": "every agent many times, minutes",
    "drills": "a cluster that is broken on purpose, hours",
    "in_flight": "as many Ray nodes and agents as the machine holds, minutes",
    "large_run": "100,000 attempts on two databases, 10 minutes",
    "large_store": "a million calls on two databases, hours and 10 GB",
    "scale": "Ray nodes and PostgreSQL, 5 minutes",
    "scanners": "hundreds of trajectories, an hour",
}
LIMIT_S = 900.0  # of one benchmark, on a busy machine
END_S = 10.0  # from the signal that asks it to end to the one that ends it


class Ended(NamedTuple):
    """A benchmark's exit code, and the last that it said."""

    code: int
    said: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--full", action="store_true", help="each with its own defaults: longer, steadier")
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {figures.BASELINE.name}")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="the longest that one benchmark may take")
    args = parser.parse_args()
    if apart := sorted(set(args.names) & set(APART)):
        parser.error(f"{apart[0]} has a command of its own: python -m bench.{apart[0]} ({APART[apart[0]]})")
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    # As Ctrl-C: the benchmark ends too, and what is known is shown
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine, began, before = figures.read_machine(), time.monotonic(), figures.read_baseline()
    not_run: dict[str, str] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as folder:
        where = Path(folder) / "figures"
        name = ""
        try:
            for name in args.names or BENCHES:
                print(f"\n== {name}", flush=True)
                ended = run(name, () if args.full else BENCHES[name], where, args.limit_s)
                noted = [figure for figure in figures.read(where) if figure.bench == name]
                last = before[name].figures if name in before else {}
                missing = [one for one in last if one not in {figure.name for figure in noted}]
                is_over = ended.code == 1 and not missing and not all(figure.good for figure in noted)
                if ended.code == figures.NOT_HERE or not noted:
                    not_run[name] = ended.said
                elif ended.code != 0 and not is_over:
                    not_run[name] = f"broke after {len(noted)} figures, which are not recorded: {ended.said}"
                else:
                    if missing:
                        not_run[f"{name}, in part"] = f"recorded, and not measured now: {', '.join(missing)}"
                    if args.record:
                        figures.record(noted, machine)
                if ended.code not in (0, figures.NOT_HERE) or (ended.code == 0 and not noted):
                    failed.append(name)
        except KeyboardInterrupt:  # what is known by now is shown
            not_run[name] = "it was ended, and those after it were not begun"
            failed.append(name)
        found = figures.read(where)
    took = f"{(time.monotonic() - began) / 60:.1f} minutes"
    print(f"\n== every figure ({machine}; {took})\n{figures.table(found, before)}")
    for name, why in not_run.items():
        print(f"{'NONE' if name in failed else 'not run':8}{name}: {why}")
    print("\nby commands of their own (python -m bench.NAME):")
    for name, why in APART.items():
        print(f"  {name:13}{why}")
    if failed:
        print(f"\nover budget or broken: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, options: tuple[str, ...], where: Path, limit_s: float) -> Ended:
    """In a session of its own, so that what it started ends with it: a program that is left over would hold its output open."""
    environment = {**os.environ, figures.VARIABLE: str(where), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", f"bench.{name}", *options]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=pass_on, args=(process.stdout, lines), daemon=True)
    reader.start()
    late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_all(process)
        reader.join(END_S)
    if late:
        return Ended(process.returncode or 1, f"it took longer than {limit_s:g} s")
    return Ended(process.returncode, lines[-1] if lines else "it said nothing")


def pass_on(output: IO[str], lines: list[str]) -> None:
    for line in output:
        print(line, end="", flush=True)
        if line.strip():
            lines[:] = [line.strip()]


def end_all(process: subprocess.Popen[str]) -> None:
    """The benchmark, if it still runs, and what is left of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


if __name__ == "__main__":
    sys.exit(main())
