"""Rollouts: what the lifecycle costs beside the agent itself, and memory over many of them.

Ratios of one run. `alone` is the agent's process time inside an open sandbox with a gate that answers at once; a rollout does all
the rest too: opening, preparing, stopping, copying out, judging in a fresh sandbox, keeping.

With `--workers`, the same run shared among so many processes of this machine.

    python -m bench.rollouts [--count 500] [--parallel 8] [--workers 1 2 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import rollyard as ry
from bench.figures import note
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor

# what DESIGN asks for: the lifecycle beside the agent, one at a time, and the runner's own CPU
BUDGETS = {"overhead_ms_p50, 1 parallel": 150.0, "runner_cpu_ms_per_rollout, 8 parallel": 60.0}
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


async def share(count: int, parallel: int, workers: int) -> float:
    """Rollouts a second of a run that so many processes share, from the first to the last that ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(SCRIPT))
        config = RunConfig(policies={"policy": f"scripted:{script}"})
        async with ry.Store.open(Path(folder) / "runs.db") as store:
            ended: list[float] = []
            where = executor("local", workers=workers)
            options = {"agent": "shell-agent", "store": store, "config": config, "parallel": parallel}
            async with ry.Run(tasks(count), executor=where, **options) as run:
                async for rollout in run:
                    assert rollout.reward == 1.0, rollout
                    ended.append(time.monotonic())
    return (count - 1) / (ended[-1] - ended[0])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--parallel", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    asked = parser.parse_args(argv)
    first = 0.0
    for workers in asked.workers:
        rate = asyncio.run(share(asked.count, max(asked.parallel), workers))
        first = first or rate
        print(f"{workers:3} workers, {max(asked.parallel)} parallel: {rate:8.2f} rollouts/s, {rate / first:5.2f}x")
    if asked.workers:
        return 0
    within: list[bool] = []
    for parallel in asked.parallel:
        for name, value in asyncio.run(measure(max(20, asked.count // (8 if parallel == 1 else 1)), parallel)).items():
            label = f"{name}, {parallel} parallel"
            more = "more" if name == "rollouts_per_s" else None
            within.append(note(label, value, BUDGETS.get(label), more))
        print()
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
