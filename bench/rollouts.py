"""Rollouts: what the lifecycle costs beside the agent itself, and memory over many of them.

Ratios of one run. `alone` is the agent's process time inside an open sandbox with a gate that answers at once; a rollout does all
the rest too: opening, preparing, stopping, copying out, judging in a fresh sandbox, keeping.

With `--workers`, the same run shared among so many processes of this machine: with what the machine's cores did meanwhile, the
workers themselves, and how long one waits that wants to write to the store.

    python -m bench.rollouts [--count 500] [--parallel 8] [--workers 1 2 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import rollyard as ry
from bench.figures import note
from bench.load import tree
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor

# what DESIGN asks for: the lifecycle beside the agent, one at a time, and the runner's own CPU
BUDGETS = {"overhead_ms_p50, 1 parallel": 150.0, "runner_cpu_ms_per_rollout, 8 parallel": 60.0}
TICKS = os.sysconf("SC_CLK_TCK")
SCRIPT = {"steps": [{"shell": "echo hello > out.txt"}, {"text": "done"}]}


def tasks(count: int) -> list[Task]:
    check = VerifierSpec(kind="commands", options={"commands": ["test -f out.txt"]})
    return [Task(id=f"t{n}", instruction="x", verifier=check) for n in range(count)]


async def measure(count: int, parallel: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            ry.Store.open(Path(folder) / "runs.db") as store,
            ry.Gate(ry.policy.scripted(SCRIPT), log=store) as gate,
            ry.sandbox.backend("local") as backend,
        ):
            before = resource.getrusage(resource.RUSAGE_SELF)
            began = time.monotonic()
            waits: list[float] = []
            walls: list[float] = []
            rewards: set[float | None] = set()
            async with ry.Run(
                tasks(count), agent="shell-agent", sandbox=backend, gate=gate, store=store, parallel=parallel
            ) as run:
                async for rollout in run:
                    walls.append(rollout.wall_s)
                    waits.append(sum(s.duration_s for s in rollout.stages if s.name == "wait"))
                    rewards.add(rollout.reward)
            took = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
    assert rewards == {1.0}, rewards
    return {
        "rollouts_per_s": count / took,
        "agent_wall_s_p50": median(waits),
        "rollout_wall_s_p50": median(walls),
        "overhead_ms_p50": 1000 * median(w - a for w, a in zip(walls, waits, strict=True)),
        "runner_cpu_ms_per_rollout": 1000
        * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        / count,
        "runner_rss_growth_kb_per_rollout": (after.ru_maxrss - before.ru_maxrss) / count,
    }


class Shared(NamedTuple):
    """A run that several workers share, from the first rollout that ended to the last."""

    rate: float
    cores: float  # of the machine that were busy
    kernel: float  # of those, in the kernel
    workers: float  # of those, the workers' own
    busiest: float  # the worker that used most
    wait_ms: float  # for the store's lock, mean


async def share(count: int, parallel: int, workers: int) -> Shared:
    with tempfile.TemporaryDirectory() as folder:
        script, where = Path(folder) / "script.json", Path(folder) / "runs.db"
        script.write_text(json.dumps(SCRIPT))
        config = RunConfig(policies={"policy": f"scripted:{script}"})
        async with ry.Store.open(where) as store:
            ended = 0
            options = {"agent": "shell-agent", "store": store, "config": config, "parallel": parallel}
            async with ry.Run(tasks(count), executor=executor("local", workers=workers), **options) as run:
                async for rollout in run:
                    assert rollout.reward == 1.0, rollout
                    ended += 1
                    if ended == 1:
                        began, machine, own, lock = time.monotonic(), machine_s(), workers_s(), LockProbe(where)
                    if ended == count * 3 // 4:  # at the end those that have nothing left to do are gone
                        so_far = time.monotonic() - began
                        used = [(after - own.get(pid, 0.0)) / so_far for pid, after in workers_s().items()]
                    if ended == count:
                        took = time.monotonic() - began
                        busy, kernel = (
                            (after - before) / took for before, after in zip(machine, machine_s(), strict=True)
                        )
    return Shared((count - 1) / took, busy, kernel, sum(used), max(used, default=0.0), lock.end())


def machine_s() -> tuple[float, float]:
    """CPU seconds of all cores since the start, and those in the kernel."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    kernel = system + irq + softirq
    return (user + nice + kernel) / TICKS, kernel / TICKS


def workers_s() -> dict[int, float]:
    """CPU seconds of each worker, without what it started."""
    found: dict[int, float] = {}
    for pid in tree(os.getpid())[1:]:
        with suppress(OSError):
            if b"process_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


class LockProbe:
    """Wants to write to a store every few milliseconds, and notes how long it waits."""

    def __init__(self, path: Path) -> None:
        self._path, self._over, self._waits = path, threading.Event(), [0.0]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Mean milliseconds."""
        self._over.set()
        self._thread.join()
        return 1000 * mean(self._waits)

    def _run(self) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=0)) as raw:
            while not self._over.wait(0.02):
                began = time.perf_counter()
                while not self._take(raw):
                    time.sleep(0.0001)
                self._waits.append(time.perf_counter() - began)

    def _take(self, raw: sqlite3.Connection) -> bool:
        try:
            raw.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        raw.execute("ROLLBACK")
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--parallel", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    args = parser.parse_args(argv)
    first = 0.0
    for workers in args.workers:
        found = asyncio.run(share(args.count, max(args.parallel), workers))
        first = first or found.rate
        print(
            f"{workers:3} workers, {max(args.parallel)} parallel: {found.rate:8.2f} rollouts/s, {found.rate / first:5.2f}x; "
            f"cores: {found.cores:.1f} of {os.cpu_count()} busy, {found.kernel:.1f} in the kernel, {found.workers:.1f} of the "
            f"workers (busiest {found.busiest:.2f}); {found.wait_ms:.2f} ms for the store's lock",
            flush=True,
        )
    if args.workers:
        return 0
    within: list[bool] = []
    for parallel in args.parallel:
        for name, value in asyncio.run(measure(max(20, args.count // (8 if parallel == 1 else 1)), parallel)).items():
            label = f"{name}, {parallel} parallel"
            more = "more" if name == "rollouts_per_s" else None
            within.append(note(label, value, BUDGETS.get(label), more))
        print()
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
