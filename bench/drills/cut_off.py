"""The drill of a node that is cut off and healed: two network namespaces, a cable between them, and the cable is pulled.

Driver, database, model server and two nodes are in one namespace, the third node in the other; no address leaves them. While
the cable is out the third node's worker is alive and thinks that it works: it must commit nothing for what others took over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from bench.drills.cluster import DrillSystem, Result, drill
from bench.drills.driver import Driver

NAME = "node_cut_off"
HERE, THERE = "198.51.100.1", "198.51.100.2"  # reserved for documentation; they exist only in the two namespaces
CUT_S = 15.0  # longer than two leases, shorter than the cluster takes to give the node up


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@contextmanager
def namespaces() -> Generator[tuple[str, str]]:
    first, second = (f"ry{os.getpid()}{side}" for side in "ab")
    try:
        for name in (first, second):
            ip("netns", "add", name)
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in ((first, HERE), (second, THERE)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], check=False)


def in_namespaces(options: argparse.Namespace) -> Result:
    """Run this module inside the first namespace; its last line is the result."""
    if os.geteuid() != 0:
        return Result(name=NAME, faults=0, seconds=0, counts={}, left={}, problem="network namespaces need root")
    with namespaces() as (first, second):
        command = ["ip", "netns", "exec", first, sys.executable, "-m", "bench.drills.cut_off", first, second]
        command += [str(options.size), str(options.seed), str(options.fault_s), str(options.limit_s)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit_s + 600)
    if done.returncode:
        return Result(name=NAME, faults=0, seconds=0, counts={}, left={}, problem=f"it ended with {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Result)


async def run_drill(first: str, second: str, size: int, seed: int, fault_s: float, limit_s: float) -> Result:
    async def cut_link(system: DrillSystem, driver: Driver) -> int:
        ip("-n", first, "link", "set", "cable", "down")
        await asyncio.sleep(CUT_S)
        ip("-n", first, "link", "set", "cable", "up")
        return 1

    system = DrillSystem(size, seed, fault_s, HERE)
    try:
        system.cluster.count = 2
        with system.cluster:
            system.cluster.add(ip=THERE, inside=["ip", "netns", "exec", second])
            await asyncio.to_thread(system.cluster.wait, 3)
            result = await drill(system, NAME, cut_link, limit_s)
            time.sleep(1)
            return result
    finally:
        system.close()


if __name__ == "__main__":
    first, second, size, *numbers = sys.argv[1:]
    found = asyncio.run(run_drill(first, second, int(size), int(numbers[0]), float(numbers[1]), float(numbers[2])))
    print(msgspec.json.encode(found).decode())
