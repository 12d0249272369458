"""One long run with a fault every minute, of another kind each time.

    python -m bench.drills.campaign [--size 3000] [--every-s 60] [--nodes 3] [--per-node 1] [--parallel 12] [--limit-s 3600]
        [--out campaign.json]

The agent is one bash that asks once (`bench/thin_agent.py`) and is judged in its own sandbox, so that the machine is busy with
what is ours. At `--limit-s` the run is cut: the driver is asked to end, and what is owed then is counted as such, not as lost.
The last faults come three leases earlier, so that claims of dead workers have been taken over by then. SIGTERM cuts it too.

Afterwards the same questions as after a drill: every attempt committed exactly once, nothing left behind. The memory of the
driver and of the workers is looked at all the while: the last quarter of what was seen of a process beside the second. `--out`
is written every 30 s, so that a campaign that is broken off has told what it knew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from bench.drills import cluster
from bench.drills.driver import Driver
from bench.drills.leftovers import Leftovers
from bench.drills.queries import account, account_so_far, count_committed, wait_for
from bench.rollouts import machine_s

FAULTS = (cluster.worker, cluster.zygote, cluster.database_restart, cluster.gate, cluster.driver, cluster.node)
LOOK_S = 2.0
TELL_S = 30.0
END_S = 120.0  # for a driver that is asked to end
WRONG = ("lost", "twice", "reward_of_infra", "zombie_calls", "leases", "open_sessions")


class Memory:
    """What processes held, by process, in MB, in the order in which it was seen."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def look(self, pids: list[int]) -> float:
        """Gives what those of now hold together."""
        total = 0.0
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
                self.seen.setdefault(pid, []).append(held)
                total += held
        return total

    def growth(self) -> list[dict[str, float]]:
        """Of the processes that lived longest: seconds, MB in their second quarter, MB in their last."""
        rows: list[dict[str, float]] = []
        for found in sorted(self.seen.values(), key=len)[-3:]:
            quarter = len(found) // 4
            if quarter:
                early, late = median(found[quarter : 2 * quarter]), median(found[-quarter:])
                rows.append({"s": len(found) * LOOK_S, "mb_early": round(early), "mb_late": round(late)})
        return rows


class Campaign:
    """One run, its faults, and what is known of it so far."""

    def __init__(self, args: argparse.Namespace, system: cluster.DrillSystem) -> None:
        self._args, self._system = args, system
        self._drivers, self._workers = Memory(), Memory()
        self._busy = machine_s()[0]
        self.began = time.monotonic()
        config = system.config(120.0, thin=True, parallel=args.parallel, lease_s=args.lease_s)
        self.driver = Driver(system.postgres.url, config, system.cluster.address, system.home, per_node=args.per_node)
        self.faults: list[dict[str, Any]] = []
        self.course: list[dict[str, Any]] = []  # what was seen every `TELL_S`
        self.cut = False

    def report(self, **more: Any) -> dict[str, Any]:
        """Everything that is known, to the file too."""
        took = time.monotonic() - self.began
        found = {
            "size": self._args.size,
            "cores": os.cpu_count(),
            "seconds": round(took),
            "cores_busy": round((machine_s()[0] - self._busy) / took, 1),
            "faults": self.faults,
            "resumed_s": [round(s, 1) for s in self.driver.resumed_s],
            "driver_memory": self._drivers.growth(),
            "worker_memory": self._workers.growth(),
            "course": self.course,
            **more,
        }
        if (path := self._args.out) is not None:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(found, indent=1) + "\n")
            fresh.replace(path)
        return found

    async def watch(self) -> None:
        printed_at = 0.0
        while True:
            driver_mb = self._drivers.look([self.driver.process.pid])
            pids = await asyncio.to_thread(self._system.workers)
            workers_mb = self._workers.look(pids)
            self.driver.drain()
            if time.monotonic() > printed_at + TELL_S:
                printed_at = time.monotonic()
                with contextlib.suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    counts = await account_so_far(self._system.postgres.url, self.driver.run_id)
                    seen = {"s": round(printed_at - self.began), **counts, "driver_mb": round(driver_mb)}
                    self.course.append({**seen, "workers": len(pids), "workers_mb": round(workers_mb)})
                    print("  ".join(f"{name} {value}" for name, value in self.course[-1].items()), flush=True)
                self.report()
            await asyncio.sleep(LOOK_S)

    async def break_things(self) -> None:
        """Until the run ends or its time is over."""
        url, every_s = self._system.postgres.url, self._args.every_s
        await wait_for(url, self.driver.run_id, 1)  # a run that has not begun cannot be broken
        due = time.monotonic() + every_s / 2
        while self.driver.process.poll() is None and not self.cut:
            if time.monotonic() > self.began + self._args.limit_s:
                self.cut = True
            elif due < time.monotonic() < self.began + self._args.limit_s - 3 * self._args.lease_s:
                fault = FAULTS[len(self.faults) % len(FAULTS)]
                due = time.monotonic() + every_s
                await fault(self._system, self.driver)
                with contextlib.suppress(OSError, TimeoutError, asyncpg.PostgresError):
                    done = await count_committed(url, self.driver.run_id)
                    self.faults.append(
                        {"s": round(time.monotonic() - self.began), "fault": fault.__name__, "committed": done}
                    )
                    print("  ".join(f"{name} {value}" for name, value in self.faults[-1].items()), flush=True)
            await asyncio.sleep(0.5)

    async def end(self) -> tuple[int, dict[str, int]]:
        self.cut = self.driver.process.poll() is None
        if self.cut:
            self.driver.interrupt()
        code = await asyncio.to_thread(self.driver.wait, END_S)
        counts = await account(self._system.postgres.url, self.driver.run_id)
        if self.cut:
            counts["lost"] -= counts["owed"]
        return code, counts


async def run(args: argparse.Namespace) -> bool:
    system = cluster.DrillSystem(args.size, args.seed, fault_s=20.0, nodes=args.nodes, disk_mb=None, large=True)
    try:
        with system.cluster:
            async with Leftovers(system.home) as left:
                campaign = Campaign(args, system)
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(campaign, "cut", True))
                watching = asyncio.create_task(campaign.watch())
                await campaign.break_things()
                took = time.monotonic() - campaign.began
                code, counts = await campaign.end()
                watching.cancel()
                campaign.report(counts=counts, ended_with=code, cut=campaign.cut, took_s=round(took))
                remains = await left.wait_until_none()
    finally:
        system.close()
    held = (campaign.cut or code in (0, 1)) and not any(counts[name] for name in WRONG) and not any(remains.values())
    rate = round(counts["committed"] / took, 1)
    found = campaign.report(
        counts=counts, left=remains, ended_with=code, cut=campaign.cut, took_s=round(took), rate=rate, held=held
    )
    print(f"\n{counts['committed']} of {args.size} attempts in {took:.0f} s, {rate} a second, ", end="")
    print(f"{len(campaign.faults)} faults; the driver {'was cut and ' if campaign.cut else ''}ended with {code}")
    if code not in (0, 1):
        print("".join([*campaign.driver.lines][-8:]))
    for name in ("counts", "left", "resumed_s", "driver_memory", "worker_memory", "cores_busy", "held"):
        print(f"{name}: {found[name]}")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=3000, help="attempts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--nodes", type=int, default=cluster.NODES)
    parser.add_argument("--per-node", type=int, default=1, help="workers on each node")
    parser.add_argument("--parallel", type=int, default=cluster.PARALLEL, help="rollouts at a time")
    parser.add_argument("--lease-s", type=float, default=15.0, help="how long a claim holds without a heartbeat")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which the run is cut")
    parser.add_argument("--out", type=Path, help="a JSON file, written every 30 s")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return 0 if asyncio.run(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
