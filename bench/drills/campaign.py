"""One long run with a fault every minute, of another kind each time.

    python -m bench.drills.campaign [--size 3000] [--every-s 60] [--nodes 3] [--per-node 1] [--parallel 12] [--limit-s 3600]

The agent is one bash that asks once (`bench/thin_agent.py`), so that the machine is busy with what is ours. At `--limit-s` no
more faults come and the run is cut: the driver is asked to end, and what is owed then is counted as such, not as lost.

Afterwards the same questions as after a drill: every attempt committed exactly once, nothing left behind. The memory of the
driver and of the workers is looked at all the while: the last quarter of what was seen of a process beside the second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from statistics import median

from bench.drills import cluster
from bench.drills.ground import Driver, Leftovers, account, committed, wait_for

FAULTS = (cluster.worker, cluster.zygote, cluster.database_restart, cluster.gate, cluster.driver, cluster.node)
LOOK_S = 1.0
END_S = 120.0  # for a driver that is asked to end
WRONG = ("lost", "twice", "reward_of_infra", "zombie_calls", "leases", "open_sessions")


class Memory:
    """What processes held, by process, in MB, in the order in which it was seen."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def look(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.seen.setdefault(pid, []).append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def growth(self) -> list[tuple[int, float, float]]:
        """Of the processes that lived longest: seconds, MB in their second quarter, MB in their last."""
        rows: list[tuple[int, float, float]] = []
        for found in sorted(self.seen.values(), key=len)[-3:]:
            quarter = len(found) // 4
            if quarter:
                rows.append((int(len(found) * LOOK_S), median(found[quarter : 2 * quarter]), median(found[-quarter:])))
        return rows


async def run(asked: argparse.Namespace) -> bool:
    size, every_s, limit_s = asked.size, asked.every_s, asked.limit_s
    ground = cluster.Ground(size, asked.seed, fault_s=20.0, nodes=asked.nodes, disk_mb=None, large=True)
    faults, drivers, workers = 0, Memory(), Memory()
    try:
        with ground.cluster:
            left = Leftovers(ground.home)
            began = time.monotonic()
            config = ground.config(120.0, thin=True, parallel=asked.parallel)
            driver = Driver(ground.postgres.url, config, ground.cluster.address, ground.home, per_node=asked.per_node)

            async def watch() -> None:
                while True:
                    drivers.look([driver.process.pid])
                    workers.look(await asyncio.to_thread(ground.workers))
                    driver.drain()
                    await asyncio.sleep(LOOK_S)

            watching = asyncio.create_task(watch())
            await wait_for(ground.postgres.url, driver.run_id, 1)  # a run that has not begun cannot be broken
            due = time.monotonic() + every_s / 2
            while driver.process.poll() is None and time.monotonic() < began + limit_s:
                if time.monotonic() > due:
                    fault = FAULTS[faults % len(FAULTS)]
                    faults, due = faults + 1, time.monotonic() + every_s
                    await fault(ground, driver)
                    done = await committed(ground.postgres.url, driver.run_id)
                    print(f"{time.monotonic() - began:6.0f} s  {fault.__name__:18}{done:8} committed", flush=True)
                await asyncio.sleep(0.5)
            took = time.monotonic() - began
            if cut := driver.process.poll() is None:
                driver.interrupt()
            code = await asyncio.to_thread(driver.wait, END_S)
            watching.cancel()
            counts = await account(ground.postgres.url, driver.run_id)
            if cut:
                counts["lost"] -= counts["owed"]
            remains = await left.after()
    finally:
        ground.close()
    done = counts["committed"]
    print(f"\n{done} of {size} attempts in {took:.0f} s, {done / took:.1f} a second, {faults} faults; ", end="")
    print(f"the driver {'was cut and ' if cut else ''}ended with {code}")
    if code not in (0, 1):
        print("".join([*driver.lines][-8:]))
    print("  ".join(f"{name} {value}" for name, value in counts.items()))
    print(f"left behind: {remains}")
    print(f"a driver that came back knew its run after {', '.join(f'{s:.1f}' for s in driver.resumed_s)} s")
    for name, memory in (("driver", drivers), ("worker", workers)):
        for lived, early, late in memory.growth():
            print(f"{name}, seen for {lived} s: {early:.0f} MB, at the end {late:.0f} MB")
    return (cut or code in (0, 1)) and not any(counts[name] for name in WRONG) and not any(remains.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=3000, help="attempts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--nodes", type=int, default=cluster.NODES)
    parser.add_argument("--per-node", type=int, default=1, help="workers on each node")
    parser.add_argument("--parallel", type=int, default=cluster.PARALLEL, help="rollouts at a time")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which the run is cut")
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return 0 if asyncio.run(run(asked)) else 1


if __name__ == "__main__":
    sys.exit(main())
