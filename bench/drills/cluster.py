"""Drills of a run on a Ray cluster of three nodes: one part is broken while it works, then its records are counted.

Every drill is one run of `size` attempts. The fault comes when a share of them is committed, chosen by the seed; a drill that
heals its fault does so itself. The run must end by itself, with every attempt committed exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from bench import thin_agent
from bench.drills.driver import Driver, PostgresServer, Upstream
from bench.drills.leftovers import Leftovers, Starvation, find_zygotes
from bench.drills.queries import account, causes, recent_events, wait_for
from tests.servers.ray_cluster import RayCluster

LEASE_S = 6.0
NODES = 3
PARALLEL = max(12, 3 * (os.cpu_count() or 1))  # rollouts at a time
CONFIG = """
tasks = "{tasks}"
agents = ["{agent}"]
attempts = {attempts}
parallel = {parallel}
retries = 20
lease_s = {lease}
model = "drill"
[policies]
policy = "upstream:{url}"
[limits]
boot = 60.0
agent = {limit}
verify = 60.0
"""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    faults: int
    seconds: float
    counts: dict[str, int]
    left: dict[str, int]
    problem: str = ""
    causes: dict[str, int] = {}
    size: int = 0
    seed: int = 0
    cores: int = 0
    load: float = 0.0  # of the machine when it ended

    @property
    def ok(self) -> bool:
        wrong = ("lost", "twice", "reward_of_infra", "zombie_calls", "leases", "open_sessions")
        return (
            self.faults > 0
            and not self.problem
            and not any(self.counts.get(n) for n in wrong)
            and not any(self.left.values())
        )


def machine() -> dict[str, float]:
    return {"cores": os.cpu_count() or 0, "load": round(os.getloadavg()[0], 1)}


class DrillSystem:
    """Everything one drill may break. Made once and mended between drills."""

    def __init__(
        self,
        size: int,
        seed: int,
        fault_s: float,
        host: str = "127.0.0.1",
        *,
        nodes: int = NODES,
        disk_mb: int | None = 400,
        large: bool = False,
    ) -> None:
        self.size, self.seed, self.fault_s, self.host, self.count = size, seed, fault_s, host, nodes
        self.place = Path(tempfile.mkdtemp(prefix="ry-drill-"))
        self.home = str(self.place / "home")
        Path(self.home).mkdir()
        self.postgres = PostgresServer(host, disk_mb=disk_mb if os.geteuid() == 0 else None, large=large)
        self.upstream = Upstream(host)
        ip = None if host.startswith("127.") else host
        self.cluster = RayCluster(nodes, env={"ROLLYARD_HOME": self.home}, ip=ip)
        self.chance = random.Random(seed)

    def config(self, agent_s: float, *, thin: bool = False, parallel: int = PARALLEL, lease_s: float = LEASE_S) -> Path:
        """A `thin` agent asks once, does nothing and is judged where it was; else it is the shell agent, which writes a file."""
        attempts, check = 10, "true" if thin else "grep -q hello out.txt"
        agent = str(thin_agent.write(self.place)) if thin else "shell-agent"
        judge = {"kind": "commands", "grade": "live" if thin else "sealed", "options": {"commands": [check]}}
        rows = [
            msgspec.json.encode({"id": f"t{n}", "instruction": "write hello", "verifier": judge})
            for n in range(max(1, self.size // attempts))
        ]
        tasks = self.place / "tasks.jsonl"
        tasks.write_bytes(b"\n".join(rows) + b"\n")
        config = self.place / "run.toml"
        text = CONFIG.format(
            tasks=tasks,
            agent=agent,
            attempts=attempts,
            parallel=parallel,
            lease=lease_s,
            url=self.upstream.url,
            limit=agent_s,
        )
        config.write_text(text)
        return config

    def workers(self) -> list[int]:
        """The workers' processes, on all nodes."""
        return self.cluster.worker_pids()

    def mend(self) -> None:
        """All nodes, a running database, a healthy model server."""
        self.upstream.fault("none")
        self.postgres.drain()
        if not self.postgres.running():
            self.postgres.start()
        alive = [node for node in self.cluster.nodes if node.process.poll() is None]
        for _ in range(self.count - len(alive)):
            self.cluster.add()
        self.cluster.nodes = [node for node in self.cluster.nodes if node.process.poll() is None]
        self.cluster.wait(self.count)

    def close(self) -> None:
        self.cluster.close()
        self.upstream.close()
        self.postgres.close()
        subprocess.run(["rm", "-rf", str(self.place)], check=False)


Fault = Callable[[DrillSystem, Driver], Awaitable[int]]


async def worker(system: DrillSystem, driver: Driver) -> int:
    """SIGKILL of one worker, three times."""
    killed = 0
    for _ in range(3):
        if pids := system.workers():
            os.kill(system.chance.choice(pids), signal.SIGKILL)
            killed += 1
        await asyncio.sleep(4)
    return killed


async def node(system: DrillSystem, driver: Driver) -> int:
    """SIGKILL of every process of a node; a new node joins."""
    system.cluster.nodes[-1].kill()
    system.cluster.nodes.pop()
    await asyncio.sleep(3)
    system.cluster.add()
    return 1


async def driver(system: DrillSystem, driver: Driver) -> int:
    """SIGKILL of the driver, twice; it comes back with --resume."""
    for _ in range(2):
        driver.kill()
        await asyncio.sleep(2)
        driver.resume()
    return 2


async def gate(system: DrillSystem, driver: Driver) -> int:
    """SIGKILL of a worker while its gate holds calls that the model has not answered."""
    system.upstream.fault("hang")
    end = time.monotonic() + 30
    while system.upstream.ask("/state")["held"] < 2 and time.monotonic() < end:
        await asyncio.sleep(0.1)
    os.kill(system.chance.choice(system.workers()), signal.SIGKILL)
    system.upstream.fault("none")
    return 1


async def zygote(system: DrillSystem, driver: Driver) -> int:
    """SIGKILL of the process that makes a worker's sandboxes, on every node."""
    return kill_zygotes(system.home)


def kill_zygotes(home: str) -> int:
    killed = 0
    for pid in find_zygotes(home):
        with contextlib.suppress(OSError):
            if "\nPPid:\t1\n" in Path(f"/proc/{pid}/status").read_text():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


async def database_restart(system: DrillSystem, driver: Driver) -> int:
    """The database stops at once, as in a crash, and comes back after three seconds."""
    system.postgres.stop("immediate")
    await asyncio.sleep(3)
    system.postgres.start()
    return 1


async def database_pause(system: DrillSystem, driver: Driver) -> int:
    """The database stands still for 20 s, longer than three leases."""
    system.postgres.signal(signal.SIGSTOP)
    await asyncio.sleep(20)
    system.postgres.signal(signal.SIGCONT)
    return 1


async def disk_full(system: DrillSystem, driver: Driver) -> int:
    """The database's disk is full for 10 s; an operator starts it again if it gave up."""
    if not system.postgres.mounted:
        raise RuntimeError("filling a disk needs a small one, which only root can mount")
    system.postgres.fill()
    await asyncio.sleep(10)
    system.postgres.drain()
    if not system.postgres.running():
        system.postgres.start()
    return 1


async def clock(system: DrillSystem, driver: Driver) -> int:
    """A worker joins whose clock jumps an hour ahead: in its eyes every lease has run out."""
    command = [sys.executable, "-m", "bench.drills.clock_jump_worker", system.postgres.url, driver.run_id, "3600"]
    env = {**os.environ, "ROLLYARD_HOME": system.home}
    process = subprocess.Popen(command, env=env)
    try:
        code = await asyncio.to_thread(process.wait, 600)
    finally:
        process.kill()
    if code:
        raise RuntimeError(f"the worker with another clock ended with {code}")
    return 1


async def upstream_503(system: DrillSystem, driver: Driver) -> int:
    """The model server answers 503 for a while."""
    system.upstream.fault("503")
    await asyncio.sleep(system.fault_s)
    system.upstream.fault("none")
    return 1


async def upstream_hang(system: DrillSystem, driver: Driver) -> int:
    """The model server takes calls and answers none, for longer than an agent may take."""
    system.upstream.fault("hang")
    await asyncio.sleep(max(system.fault_s, 25))
    system.upstream.fault("none")
    return 1


async def upstream_cut(system: DrillSystem, driver: Driver) -> int:
    """The model server breaks off every answer in its middle."""
    system.upstream.fault("cut")
    await asyncio.sleep(system.fault_s)
    system.upstream.fault("none")
    return 1


DRILLS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        worker,
        node,
        driver,
        gate,
        zygote,
        database_restart,
        database_pause,
        disk_full,
        clock,
        upstream_503,
        upstream_hang,
        upstream_cut,
    )
}


async def drill(system: DrillSystem, name: str, fault: Fault, limit_s: float) -> Result:
    await asyncio.to_thread(system.mend)
    async with Leftovers(system.home) as left:
        return await drill_watched(system, left, name, fault, limit_s)


async def drill_watched(system: DrillSystem, left: Leftovers, name: str, fault: Fault, limit_s: float) -> Result:
    began = time.monotonic()
    agent_s = 20.0 if name == "upstream_hang" else 120.0
    process = Driver(system.postgres.url, system.config(agent_s), system.cluster.address, system.home)
    problem, injected, starvation = "", 0, Starvation()
    try:
        share = system.chance.uniform(0.1, 0.3)
        await wait_for(system.postgres.url, process.run_id, int(system.size * share))
        injected = await fault(system, process)
        code = await asyncio.to_thread(process.wait, limit_s)
        if code not in (0, 1):
            problem = f"the driver ended with {code}: {[*process.lines][-1:]} {process.process.stdout.read()[-300:]}"
    except (RuntimeError, TimeoutError, OSError) as error:
        stages = await recent_events(system.postgres.url, process.run_id)
        problem = f"{type(error).__name__}: {error}; {stages}; {starvation.describe(system.workers())}"
    finally:
        if process.process.poll() is None:
            process.kill()
    counts = await account(system.postgres.url, process.run_id)
    why = await causes(system.postgres.url, process.run_id)
    remains = await left.wait_until_none()
    remains["workers"] = len(system.workers())
    seconds = time.monotonic() - began
    return Result(
        name=name,
        faults=injected,
        seconds=seconds,
        counts=counts,
        left=remains,
        problem=problem,
        causes=why,
        size=system.size,
        seed=system.seed,
        **machine(),
    )
