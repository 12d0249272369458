"""`python -m bench.drills [--size 500] [--seed 1] [--only NAME ...] [--missing] [--out docs/drills.md]`: run them, print, keep
the table.

A drill that fails with an unexpected error is a line of the table like any other, and the next one begins. `--missing` runs those
that have not passed yet with this size and seed on a machine with as many cores, so an interrupted command can be continued.

Drills run one after the other. On a machine with enough cores, drills of the control plane that leave nothing another drill could
count run in processes beside the cluster's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from bench.drills import cluster, cut_off, plane
from bench.drills.cluster import Result, machine
from bench.drills.table import page, row

NAMES = (*cluster.DRILLS, cut_off.NAME, *plane.DRILLS)
CORES_FOR_BOTH = 8


async def run(options: argparse.Namespace) -> list[Result]:
    wanted = options.only or [*NAMES]
    if options.missing:
        wanted = [name for name in wanted if not has_passed(name, options)]
    done: list[Result] = []

    def keep(result: Result) -> None:
        """At once, so that an interrupted command keeps its results."""
        done.append(result)
        print(row(result), flush=True)
        if options.out:
            options.out.write_text(page(merge_results([result], options.out.with_suffix(".json"))))

    of_cluster = [n for n in wanted if n in cluster.DRILLS]
    both = of_cluster and (os.cpu_count() or 1) >= CORES_FOR_BOTH
    apart = [group for names in plane.APART if (group := [n for n in names if n in wanted])] if both else []
    with ExitStack() as stack:
        waiting = [stack.enter_context(run_beside(group, options)) for group in apart]
        if of_cluster:
            system = cluster.DrillSystem(options.size, options.seed, options.fault_s)
            try:
                with system.cluster:
                    for name in of_cluster:
                        fault = cluster.DRILLS[name]
                        keep(await run_drill(name, options, cluster.drill(system, name, fault, options.limit_s)))
            finally:
                system.close()
        if cut_off.NAME in wanted:
            keep(await run_drill(cut_off.NAME, options, asyncio.to_thread(cut_off.in_namespaces, options)))
        for wait in waiting:
            for result in await asyncio.to_thread(wait):
                keep(result)
    for name in [n for n in wanted if n in plane.DRILLS and not any(n in group for group in apart)]:
        keep(await run_drill(name, options, plane.drill(name, options)))
    return done


async def run_drill(name: str, options: argparse.Namespace, drill: Awaitable[Result]) -> Result:
    """Its result; an error that it did not expect is one too."""
    try:
        return await drill
    except Exception as error:  # whatever it is, the other drills are run and the table says so
        problem = f"{type(error).__name__}: {error}"
        size, seed = options.size, options.seed
        return Result(
            name=name, faults=0, seconds=0, counts={}, left={}, problem=problem, size=size, seed=seed, **machine()
        )


def has_passed(name: str, options: argparse.Namespace) -> bool:
    """Whether the table says that it passed, with this size and seed and of a machine with as many cores."""
    setting = (options.size, options.seed, os.cpu_count())
    kept = read_kept(options.out.with_suffix(".json")) if options.out else {}
    return name in kept and kept[name].ok and (kept[name].size, kept[name].seed, kept[name].cores) == setting


@contextmanager
def run_beside(names: Sequence[str], options: argparse.Namespace) -> Generator[Callable[[], list[Result]]]:
    """These drills in a process of their own, and what waits for their results."""
    with tempfile.TemporaryDirectory(prefix="ry-drills-") as folder:
        page, log = Path(folder, "drills.md"), Path(folder, "log")
        command = [sys.executable, "-m", "bench.drills", "--only", *names, "--out", str(page)]
        command += ["--size", str(options.size), "--seed", str(options.seed)]
        command += ["--fault-s", str(options.fault_s), "--limit-s", str(options.limit_s)]
        with log.open("wb") as lines:
            process = subprocess.Popen(command, stdout=lines, stderr=lines)

        def wait() -> list[Result]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(options.limit_s)
            kept = page.with_suffix(".json")
            found = msgspec.json.decode(kept.read_bytes(), type=list[Result]) if kept.exists() else []
            said = f"its process ended with {process.returncode}: {log.read_text()[-500:]}"
            missing = [name for name in names if not any(result.name == name for result in found)]
            return found + [Result(name=n, faults=0, seconds=0, counts={}, left={}, problem=said) for n in missing]

        try:
            yield wait
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def read_kept(kept: Path) -> dict[str, Result]:
    return {r.name: r for r in msgspec.json.decode(kept.read_bytes(), type=list[Result])} if kept.exists() else {}


def merge_results(done: list[Result], kept: Path) -> list[Result]:
    """With the results of earlier commands for drills that were not run now, in the order of the drills."""
    found = read_kept(kept)
    found |= {result.name: result for result in done}
    ordered = [found[name] for name in NAMES if name in found]
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=500, help="attempts of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-s", type=float, default=60.0, help="how long the model server fails")
    parser.add_argument("--limit-s", type=float, default=900.0, help="how long a run may take after its fault")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--missing", action="store_true", help="only those that have not passed yet, as --out says")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    done = asyncio.run(run(options))
    broken = [result.name for result in done if not result.ok]
    print(
        f"{len(done) - len(broken)} of {len(done)} drills passed" + (f"; broken: {', '.join(broken)}" if broken else "")
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
