"""Drills of the control plane's two replicas on one PostgreSQL: creates and deletes go on while a replica or the database dies.

Every create names an idempotency key and is sent again, to the other replica, until it is answered. Afterwards: one instance per
key, the quota exactly the live instances, and after deleting all of them nothing left on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg

from bench.drills.breakable_link import BreakableLink
from bench.drills.cluster import Result, kill_zygotes, machine
from bench.drills.driver import ROLLYARD, PostgresServer, free_port
from bench.drills.leftovers import Leftovers
from rollyard.core.errors import PlaneConflict, PlaneError, PlaneNotFound, PlaneUnavailable
from rollyard.plane.client.plane import Plane

GIVE_UP_S = 180.0
SETTLE_S = 420.0


class Replica:
    def __init__(self, place: Path, url: str, engine: str, number: int, *, program: list[str] | None = None) -> None:
        self.port = free_port()
        self.key_file = place / "key"
        self.command = [*(program or [str(ROLLYARD)]), "serve", "plane", "--engine", engine, "--store", url]
        self.command += ["--port", str(self.port)]
        self.command += ["--admin-key-file", str(self.key_file), "--quota", "10000"]
        self.env = {**os.environ, "ROLLYARD_HOME": str(place / "home")}
        self.log = place / f"replica{number}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.env, stdout=log, stderr=log)

    async def ready(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.2)
        raise TimeoutError(f"a replica did not start: {self.log.read_text()[-500:]}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


class DrillSystem:
    def __init__(self, engine: str, seed: int) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="ry-drill-plane-"))
        self.home = str(self.place / "home")
        Path(self.home).mkdir()
        self.postgres = PostgresServer(disk_mb=400 if os.geteuid() == 0 else None)
        self.seed, self.chance = seed, random.Random(seed)
        self.engine = engine
        self.replicas = [Replica(self.place, self.postgres.url, engine, 0)]

    async def open(self) -> None:
        await self.replicas[0].ready()
        self.link = await BreakableLink.open("127.0.0.1", self.postgres.port)
        url = self.postgres.url.replace(f":{self.postgres.port}/", f":{self.link.port}/")
        self.replicas.append(Replica(self.place, url, self.engine, 1))
        await self.replicas[1].ready()
        self.clients = [self.client(replica) for replica in self.replicas]

    def client(self, replica: Replica) -> Plane:
        return Plane(f"http://127.0.0.1:{replica.port}", replica.key_file.read_text().strip(), timeout_s=40)

    async def try_replicas(self, work: Callable[[Plane], Awaitable[object]]) -> object:
        """From one replica to the other until one answers."""
        end, turn = time.monotonic() + GIVE_UP_S, self.chance.randrange(2)
        while True:
            try:
                return await work(self.clients[turn % 2])
            except (PlaneUnavailable, PlaneConflict):
                if time.monotonic() > end:
                    raise
            turn += 1
            await asyncio.sleep(0.3)

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()
        for replica in self.replicas:
            replica.kill()
        self.link.close()
        self.postgres.close()
        shutil.rmtree(self.place, ignore_errors=True)


async def replica(system: DrillSystem) -> int:
    """SIGKILL of one replica, then of the other; each comes back after three seconds."""
    for one in system.replicas:
        one.kill()
        await asyncio.sleep(3)
        one.start()
        await one.ready()
    return 2


async def database_restart(system: DrillSystem) -> int:
    system.postgres.stop("immediate")
    await asyncio.sleep(3)
    system.postgres.start()
    return 1


async def database_pause(system: DrillSystem) -> int:
    system.postgres.signal(signal.SIGSTOP)
    await asyncio.sleep(20)
    system.postgres.signal(signal.SIGCONT)
    return 1


async def disk_full(system: DrillSystem) -> int:
    """The database's disk is full for 10 s; an operator starts it again if it gave up."""
    if not system.postgres.mounted:
        raise OSError("filling a disk needs a small one, which only root can mount")
    system.postgres.fill()
    await asyncio.sleep(10)
    system.postgres.drain()
    if not system.postgres.running():
        system.postgres.start()
    return 1


async def cut_off(system: DrillSystem) -> int:
    """The second replica is cut off from the database for 20 s: what it has sent does not arrive, and no connection ends."""
    system.link.cut()
    await asyncio.sleep(20)
    system.link.restore()
    return 1


async def clock(system: DrillSystem) -> int:
    """A third replica joins whose clock is an hour ahead, and sweeps: by its clock every lease and every instance's time
    is over."""
    ahead = [sys.executable, "-m", "bench.drills.wrong_clock", "3600"]
    third = Replica(system.place, system.postgres.url, "noop", 2, program=ahead)
    system.replicas.append(third)
    await third.ready()
    client = system.client(third)
    try:
        for _ in range(10):
            await client.json("POST", "/v1/sweep")
            await asyncio.sleep(1)
    finally:
        await client.aclose()
    third.kill()
    return 1


async def zygote(system: DrillSystem) -> int:
    """SIGKILL of the process that makes a replica's sandboxes, of both."""
    return kill_zygotes(system.home)


Fault = Callable[[DrillSystem], Awaitable[int]]
DRILLS: dict[str, tuple[str, Fault]] = {
    "plane_replica": ("local", replica),
    "plane_zygote": ("local", zygote),
    "plane_restart": ("noop", database_restart),
    "plane_pause": ("noop", database_pause),
    "plane_disk_full": ("noop", disk_full),
    "plane_cut_off": ("noop", cut_off),
    "plane_clock": ("noop", clock),
}
# drills that may run while others do, and those that follow each other. A replica that is killed while it makes an instance
# leaves it for five minutes; a maker of sandboxes that is killed leaves groups that every other drill would count as orphans
APART = (("plane_replica",), tuple(name for name, (engine, _) in DRILLS.items() if engine == "noop"))


async def drill(name: str, options: argparse.Namespace) -> Result:
    (engine, fault), size = DRILLS[name], options.size
    system = DrillSystem(engine, options.seed)
    async with Leftovers(system.home) as left:
        return await drill_watched(system, left, name, fault, size)


async def drill_watched(system: DrillSystem, left: Leftovers, name: str, fault: Fault, size: int) -> Result:
    began, problem, counts, injected = time.monotonic(), "", {}, 0
    remains: dict[str, int] = {}
    try:
        await system.open()
        made: dict[str, str] = {}
        slots = asyncio.Semaphore(6)

        async def one(number: int) -> None:
            async with slots:
                key = f"drill-{number}"
                request = {"image": "host", "ttl_s": 600, "labels": {"drill": key}}
                found = await system.try_replicas(lambda plane: plane.instances.create(idempotency_key=key, **request))
                made[key] = found["id"]
                await asyncio.sleep(0.05)

        work = asyncio.gather(*(one(number) for number in range(size)))
        while len(made) < size * system.chance.uniform(0.1, 0.3):
            await asyncio.sleep(0.05)
        injected = await fault(system)
        await until_done(work, made)
        counts = await count_records(system, made)
        for key in made.values():
            await system.try_replicas(lambda plane, key=key: wait_until_gone(plane, key))
        counts["leases"] = await settle(system, left)
        for one in system.replicas:
            one.kill()
        remains = await left.wait_until_none()
    except (PlaneError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        await system.close()
    seconds = time.monotonic() - began
    return Result(
        name=name,
        faults=injected,
        seconds=seconds,
        counts=counts,
        left=remains,
        problem=problem,
        size=size,
        seed=system.seed,
        **machine(),
    )


async def until_done(work: asyncio.Future[list[None]], made: dict[str, str]) -> None:
    """However slow the machine is; `GIVE_UP_S` without a new instance is too long."""
    before = -1
    while len(made) > before:
        before = len(made)
        done, _ = await asyncio.wait((work,), timeout=GIVE_UP_S)
        if done:
            work.result()
            return
    work.cancel()
    raise TimeoutError(f"{before} instances, and no new one for {GIVE_UP_S:.0f} s")


async def settle(system: DrillSystem, left: Leftovers) -> int:
    """The quota that is still in use. The sweep ends what a killed replica was making, once its time to boot is over.
    Processes are not looked at yet: replicas that live keep what makes their sandboxes."""
    end = time.monotonic() + SETTLE_S
    while True:
        await system.try_replicas(lambda plane: plane.json("POST", "/v1/sweep"))
        usage = await system.try_replicas(lambda plane: plane.usage())
        remains = await left.wait_until_none(1)
        there = any(count for name, count in remains.items() if name != "processes")
        if (not usage["used"] and not there) or time.monotonic() > end:
            return usage["used"]
        await asyncio.sleep(3)


async def wait_until_gone(plane: Plane, instance_id: str) -> None:
    try:
        await plane.instances.delete(instance_id)
    except PlaneNotFound:
        return


async def count_records(system: DrillSystem, made: dict[str, str]) -> dict[str, int]:
    """Live instances against what the client got; with the noop engine, instances that died with a replica are not counted."""
    connection = await asyncpg.connect(system.postgres.url, timeout=30)
    try:
        live = {row["id"] for row in await connection.fetch("SELECT id FROM plane_instances WHERE live")}
        rows = await connection.fetchval("SELECT count(*) FROM plane_instances WHERE state <> 'failed'")
        used = await connection.fetchval("SELECT coalesce(sum(used), 0) FROM plane_owners")
    finally:
        await connection.close()
    return {
        "attempts": len(made),
        "claims": rows,
        "committed": len(live),
        "lost": len(set(made.values()) - live),
        "twice": len(live) - len(set(made.values()) & live),
        "zombie_calls": abs(used - len(live)),
    }


if __name__ == "__main__":
    print(asyncio.run(drill(sys.argv[1], argparse.Namespace(seed=1, size=200))))
