"""Rollouts in flight: how many wait for a model at once on Ray nodes of this machine, and what they cost while they wait.

    python -m bench.in_flight [--count 300] [--nodes 2] [--per-node 1] [--answer-s 60]

The agent is one bash that asks once and waits (`bench/thin_agent.py`). The model answers none until all are held, then keeps
them for `--answer-s` seconds more; in that time memory, descriptors and CPU are looked at. Afterwards every attempt must have
been committed exactly once. Root, PostgreSQL.

What the machine allows is checked first. Ray nodes start one after the other; when some do not come, what they said is printed
and the measurement goes on with those that did.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import asyncpg
import msgspec

from bench import thin_agent
from bench.drills.driver import Driver, PostgresServer, Upstream
from bench.drills.leftovers import sandbox_pids
from bench.drills.queries import account, account_so_far, causes, retry_reasons, stage_errors
from bench.rollouts import machine_s
from bench.scale import cpu_s
from rollyard.core.errors import Error
from tests.servers.ray_cluster import RayCluster

CONFIG = """
tasks = "{folder}/tasks.jsonl"
agents = ["{agent}"]
attempts = {count}
parallel = {count}
retries = 20
lease_s = {lease}
model = "drill"
[policies]
policy = "upstream:{url}"
[limits]
boot = {boot}
agent = 3600.0
verify = 600.0
"""
WRONG = ("lost", "twice", "leases", "open_sessions")
NODE_S = 45.0  # for a Ray node to start
TRIES = 3  # for each
PROCESSES, FILES = 4, 5  # of one rollout that waits: processes in its sandbox, descriptors in its worker
WATCH_S = 10.0
LOOKED_AT = 4000  # processes whose memory is read


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
    """Of everything in sandboxes of this home, and of what made them; of very many processes a share is read."""
    pids = sorted(sandbox_pids(home))
    step = len(pids) // LOOKED_AT + 1
    total = 0
    for pid in pids[::step]:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in rollup if line.startswith("Pss:")).split()[1])
        except (OSError, StopIteration):
            continue
    return total * step / 1024


def _read_limit(path: str) -> float:
    try:
        text = Path(path).read_text().strip()
    except OSError:  # not of this kernel, or not for this group
        return float("inf")
    return float("inf") if text == "max" else float(text)


def find_limits(count: int, workers: int) -> list[str]:
    """What this machine does not allow that `count` rollouts in flight need, each with what to do about it."""
    processes, files = PROCESSES * count, max(count + 100, FILES * count // workers + 200)
    wrong: list[str] = []
    for path in ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"):
        if _read_limit(path) < processes:
            wrong.append(f"{path} is {_read_limit(path):.0f}, {processes} processes are needed: sysctl -w raises it")
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        if _read_limit(path) < processes:
            wrong.append(f"{path} is {_read_limit(path):.0f}, {processes} processes are needed in this control group")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        wrong.append(f"a process may open {hard} files, {files} are needed: ulimit -Hn")
    elif soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # what is started here has it too
    if (free := _meminfo("MemAvailable")) < (needed := 5.5 * count + 500 * workers):
        wrong.append(f"{free:.0f} MB of memory are free, about {needed:.0f} are needed")
    return wrong


def start_nodes(cluster: RayCluster, count: int) -> None:
    """One after the other, up to `count`. One that does not come is explained, stopped and started again, a few times."""
    began, failed = time.monotonic(), 0
    while len(cluster.nodes) < count and failed < TRIES:
        node = cluster.add()
        try:
            cluster.wait(len(cluster.nodes))
        except Error:
            print(f"  {cluster.explain()}", flush=True)
            node.kill()
            cluster.nodes.remove(node)
            failed += 1
        else:
            failed = 0
    print(f"  {len(cluster.nodes)} Ray nodes after {time.monotonic() - began:.0f} s", flush=True)


async def until_held(upstream: Upstream, driver: Driver, count: int, limit_s: float) -> int:
    """How many are held: all of them, or those that came until `limit_s` was over."""
    end, shown = time.monotonic() + limit_s, 0
    while True:
        held = (await asyncio.to_thread(upstream.ask, "/state"))["held"]
        driver.drain()
        if held >= shown + 100:
            shown = held
            print(f"  {held} held, {limit_s - (end - time.monotonic()):.0f} s", flush=True)
        if held >= count or time.monotonic() > end:
            return held
        if driver.process.poll() is not None:
            raise RuntimeError(f"the run ended with {driver.process.returncode}: {[*driver.lines][-5:]}")
        await asyncio.sleep(0.5)


def report(
    args: argparse.Namespace, held: int, where: str, before: float, first: Look, last: Look, sandboxes_mb: float
) -> None:
    span = last.at - first.at
    print(f"{held} of {args.count} rollouts in flight {where}")
    print(f"memory: {(before - last.available_mb) / held:.1f} MB of the machine per rollout; ", end="")
    print(f"sandboxes {sandboxes_mb / held:.1f} MB each, ", end="")
    print(f"workers {last.worker_mb:.0f} MB in all, driver {last.driver_mb:.0f} MB")
    print(f"a worker has {last.worker_files} descriptors open; while all wait, in CPU seconds a second: ", end="")
    print(f"workers {(last.worker_cpu_s - first.worker_cpu_s) / span:.2f}, ", end="")
    print(f"driver {(last.driver_cpu_s - first.driver_cpu_s) / span:.3f}, ", end="")
    print(f"database {(last.database_cpu_s - first.database_cpu_s) / span:.3f}", flush=True)


async def drain(driver: Driver, postgres: PostgresServer, limit_s: float) -> tuple[int | None, dict[str, int]]:
    """How the driver ended, None when it had to be stopped, and what the store has then."""
    watching = asyncio.create_task(watch(driver, postgres))
    try:
        code = await asyncio.to_thread(driver.wait, limit_s)
    except TimeoutError:
        code = None
    finally:
        watching.cancel()
    return code, await account(postgres.url, driver.run_id)


async def watch(driver: Driver, postgres: PostgresServer) -> None:
    """How far the run is, every `WATCH_S`."""
    began, busy = time.monotonic(), machine_s()[0]
    while True:
        await asyncio.sleep(WATCH_S)
        before, busy = busy, machine_s()[0]
        with suppress(OSError, TimeoutError, asyncpg.PostgresError):
            counts = await account_so_far(postgres.url, driver.run_id)
            print(f"  {time.monotonic() - began:.0f} s after the answer: {counts['committed']} committed, ", end="")
            print(f"{counts['claims']} claims, {(busy - before) / WATCH_S:.1f} cores busy, ", end="")
            print(f"load {os.getloadavg()[0]:.0f}", flush=True)


async def measure(folder: Path, args: argparse.Namespace) -> bool:
    home, upstream, postgres = folder / "home", Upstream(), PostgresServer()
    driver: Driver | None = None
    home.mkdir()
    agent = thin_agent.write(folder)
    (folder / "tasks.jsonl").write_text('{"id": "t", "instruction": "hello", "verify": ["true"]}\n')
    (folder / "run.toml").write_text(
        CONFIG.format(
            folder=folder, agent=agent, count=args.count, url=upstream.url, lease=args.lease_s, boot=args.boot_s
        )
    )
    try:
        with RayCluster(1, env={"ROLLYARD_HOME": str(home)}, start_s=NODE_S) as cluster:
            start_nodes(cluster, args.nodes)
            before = _meminfo("MemAvailable")
            upstream.fault("hang")
            began = time.monotonic()
            driver = Driver(postgres.url, folder / "run.toml", cluster.address, str(home), per_node=args.per_node)
            held = await until_held(upstream, driver, args.count, args.start_s)
            ready_s = time.monotonic() - began
            workers = cluster.worker_pids()
            first = look(driver, workers, postgres)
            await asyncio.sleep(args.answer_s)
            last = look(driver, workers, postgres)
            sandboxes_mb = await asyncio.to_thread(_sandboxes_mb, str(home))
            where = f"on {len(cluster.nodes)} nodes with {len(workers)} workers after {ready_s:.0f} s"
            report(args, held, where, before, first, last, sandboxes_mb)
            upstream.fault("none")
            began = time.monotonic()
            code, counts = await drain(driver, postgres, args.end_s)
            print(f"answered at once, {counts['committed']} committed {time.monotonic() - began:.0f} s later; ", end="")
            print(f"the driver ended with {code}: {counts}")
            print(f"given back for another try: {await retry_reasons(postgres.url, driver.run_id)}")
            if said := await stage_errors(postgres.url, driver.run_id):
                print(f"stages failed with: {said}")
            if code != 0:
                driver.drain()
                print("the driver's last words:", *[*driver.lines][-5:], sep="\n  ")
            if counts["unscored"]:
                print(f"without a reward: {await causes(postgres.url, driver.run_id)}")
    finally:
        if driver is not None and driver.process.poll() is None:
            driver.kill()
        upstream.close()
        postgres.close()
    return (
        held == args.count
        and len(cluster.nodes) == args.nodes
        and code == 0
        and not any(counts[name] for name in WRONG)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="rollouts in flight")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="workers on each node")
    parser.add_argument("--answer-s", type=float, default=60.0, help="how long all of them wait")
    parser.add_argument("--start-s", type=float, default=1800.0, help="for all of them to be held")
    parser.add_argument("--end-s", type=float, default=1800.0, help="for all of them to be committed after the answer")
    parser.add_argument("--lease-s", type=float, default=60.0, help="how long a claim holds without a heartbeat")
    parser.add_argument("--boot-s", type=float, default=600.0, help="limits.boot: for a sandbox to open")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if wrong := find_limits(args.count, args.nodes * args.per_node):
        print("\n".join(wrong))
        return 2
    with tempfile.TemporaryDirectory(prefix="ry-in-flight-") as folder:
        return 0 if asyncio.run(measure(Path(folder), args)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
