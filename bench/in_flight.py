"""Rollouts in flight: how many wait for a model at once on Ray nodes of this machine, and what they cost while they wait.

    python -m bench.in_flight [--count 300] [--nodes 2] [--answer-s 60]

The agent is one bash that asks once and waits (`bench/thin_agent.py`). The model answers nobody until all are held, then keeps
them for `--answer-s` seconds more; in that time memory, descriptors and CPU are looked at. Afterwards every attempt must have
been committed exactly once. Root, PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import msgspec

from bench import thin_agent
from bench.drills.ground import Driver, PostgresServer, Upstream, account, sandbox_pids
from bench.scale import cpu_s
from rollyard.testing.ray_cluster import RayCluster

CONFIG = """
tasks = "{folder}/tasks.jsonl"
agents = ["{agent}"]
attempts = {count}
parallel = {count}
retries = 20
model = "drill"
[policies]
policy = "upstream:{url}"
[limits]
boot = 600.0
agent = 3600.0
verify = 600.0
"""
WRONG = ("lost", "twice", "leases", "open_sessions")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What processes hold at one moment."""

    available_mb: float
    worker_mb: float  # of all workers
    worker_files: int  # descriptors of the one that has most
    worker_cpu_s: float
    driver_mb: float
    driver_cpu_s: float
    database_cpu_s: float
    at: float


def look(driver: Driver, workers: list[int], postgres: PostgresServer) -> Look:
    return Look(
        available_mb=_meminfo("MemAvailable"),
        worker_mb=sum(map(_resident_mb, workers)),
        worker_files=max((len(os.listdir(f"/proc/{pid}/fd")) for pid in workers), default=0),
        worker_cpu_s=cpu_s(workers),
        driver_mb=_resident_mb(driver.process.pid),
        driver_cpu_s=cpu_s([driver.process.pid]),
        database_cpu_s=cpu_s(postgres.pids(), children=True),
        at=time.monotonic(),
    )


def _meminfo(name: str) -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _sandboxes_mb(home: str) -> float:
    """Of everything in sandboxes of this home, and of what made them."""
    total = 0
    for pid in sandbox_pids(home):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in rollup if line.startswith("Pss:")).split()[1])
        except (OSError, StopIteration):
            continue
    return total / 1024


def find_workers(cluster: RayCluster) -> list[int]:
    found: list[int] = []
    for pid in (pid for node in cluster.nodes for pid in node.pids()):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::NodeWorker"):
                found.append(pid)
        except OSError:
            continue
    return found


async def until_held(upstream: Upstream, driver: Driver, count: int, limit_s: float) -> int:
    """How many are held: all of them, or those that came until `limit_s` was over."""
    end, told = time.monotonic() + limit_s, 0
    while True:
        held = (await asyncio.to_thread(upstream.ask, "/state"))["held"]
        driver.drain()
        if held >= told + 100:
            told = held
            print(f"  {held} held, {limit_s - (end - time.monotonic()):.0f} s", flush=True)
        if held >= count or time.monotonic() > end:
            return held
        if driver.process.poll() is not None:
            raise RuntimeError(f"the run ended: {[*driver.lines][-5:]}")
        await asyncio.sleep(0.5)


def report(
    asked: argparse.Namespace, held: int, ready_s: float, before: float, first: Look, last: Look, sandboxes_mb: float
) -> None:
    span = last.at - first.at
    print(f"{held} of {asked.count} rollouts in flight on {asked.nodes} nodes after {ready_s:.0f} s")
    print(f"memory: {(before - last.available_mb) / held:.1f} MB of the machine per rollout; ", end="")
    print(f"sandboxes {sandboxes_mb / held:.1f} MB each, ", end="")
    print(f"workers {last.worker_mb:.0f} MB in all, driver {last.driver_mb:.0f} MB")
    print(f"a worker has {last.worker_files} descriptors open; while all wait, in CPU seconds a second: ", end="")
    print(f"workers {(last.worker_cpu_s - first.worker_cpu_s) / span:.2f}, ", end="")
    print(f"driver {(last.driver_cpu_s - first.driver_cpu_s) / span:.3f}, ", end="")
    print(f"database {(last.database_cpu_s - first.database_cpu_s) / span:.3f}", flush=True)


async def drain(driver: Driver, postgres: PostgresServer, limit_s: float) -> tuple[int | None, dict[str, int]]:
    """How the driver ended, None when it had to be stopped, and what the store has then."""
    try:
        code = await asyncio.to_thread(driver.wait, limit_s)
    except TimeoutError:
        code = None
    return code, await account(postgres.url, driver.run_id)


async def measure(folder: Path, asked: argparse.Namespace) -> bool:
    home, upstream, postgres = folder / "home", Upstream(), PostgresServer()
    driver: Driver | None = None
    home.mkdir()
    agent = thin_agent.write(folder)
    (folder / "tasks.jsonl").write_text('{"id": "t", "instruction": "hello", "verify": ["true"]}\n')
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, agent=agent, count=asked.count, url=upstream.url))
    try:
        with RayCluster(asked.nodes, env={"ROLLYARD_HOME": str(home)}) as cluster:
            before = _meminfo("MemAvailable")
            upstream.fault("hang")
            began = time.monotonic()
            driver = Driver(postgres.url, folder / "run.toml", cluster.address, str(home))
            held = await until_held(upstream, driver, asked.count, asked.start_s)
            ready_s = time.monotonic() - began
            workers = find_workers(cluster)
            first = look(driver, workers, postgres)
            await asyncio.sleep(asked.answer_s)
            last = look(driver, workers, postgres)
            sandboxes_mb = await asyncio.to_thread(_sandboxes_mb, str(home))
            report(asked, held, ready_s, before, first, last, sandboxes_mb)
            upstream.fault("none")
            began = time.monotonic()
            code, counts = await drain(driver, postgres, asked.start_s)
            print(
                f"answered at once, {counts['committed']} were committed {time.monotonic() - began:.0f} s later; ",
                end="",
            )
            print(f"the driver ended with {code}: {counts}")
    finally:
        if driver is not None and driver.process.poll() is None:
            driver.kill()
        upstream.close()
        postgres.close()
    return held == asked.count and code == 0 and not any(counts[name] for name in WRONG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="rollouts in flight")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--answer-s", type=float, default=60.0, help="how long all of them wait")
    parser.add_argument("--start-s", type=float, default=1800.0, help="for all of them to be held")
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="ry-in-flight-") as folder:
        return 0 if asyncio.run(measure(Path(folder), asked)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
