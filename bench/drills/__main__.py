"""`python -m bench.drills [--size 500] [--seed 1] [--only NAME ...] [--out docs/drills.md]`: run them, print, keep the table."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec

from bench.drills import cluster, cut_off, plane
from bench.drills.cluster import Result
from bench.drills.table import page, row

NAMES = (*cluster.DRILLS, cut_off.NAME, *plane.DRILLS)


async def run(options: argparse.Namespace) -> list[Result]:
    wanted = options.only or [*NAMES]
    done: list[Result] = []

    def keep(result: Result) -> None:
        """At once, so that a command that is broken off has not worked for nothing."""
        done.append(result)
        print(row(result), flush=True)
        if options.out:
            options.out.write_text(page(merged([result], options.out.with_suffix(".json"))))

    if any(name in cluster.DRILLS for name in wanted):
        ground = cluster.Ground(options.size, options.seed, options.fault_s)
        try:
            with ground.cluster:
                for name in [n for n in wanted if n in cluster.DRILLS]:
                    keep(await cluster.drill(ground, name, cluster.DRILLS[name], options.limit_s))
        finally:
            ground.close()
    if cut_off.NAME in wanted:
        keep(await asyncio.to_thread(cut_off.in_namespaces, options))
    for name in [n for n in wanted if n in plane.DRILLS]:
        keep(await plane.drill(name, options))
    return done


def merged(done: list[Result], kept: Path) -> list[Result]:
    """With the results of earlier commands for drills that were not run now, in the order of the drills."""
    found = {r.name: r for r in msgspec.json.decode(kept.read_bytes(), type=list[Result])} if kept.exists() else {}
    found |= {result.name: result for result in done}
    ordered = [found[name] for name in NAMES if name in found]
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drills", description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="attempts of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-s", type=float, default=60.0, help="how long the model server fails")
    parser.add_argument("--limit-s", type=float, default=900.0, help="how long a run may take after its fault")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, metavar="NAME", help=" ".join(NAMES))
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
