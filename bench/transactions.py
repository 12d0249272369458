"""What a worker's writes cost a PostgreSQL server: `python -m bench.transactions [--at-once 32 256]`.

Rollouts of twenty calls go through all that a worker writes (claim, session opened, calls, session closed, commit), so many of
them side by side in one process, with pauses between two calls as agents make them. Counted are the server's own: transactions,
statements, log, and the CPU of its processes, each by write; once with a transaction for each write, and once as it is, by turns.
From these follows what a transaction costs, and what a write in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import asyncpg
import uvloop
from msgspec.structs import replace

import rollyard as ry
from bench.figures import note
from rollyard.core.events import COMMITTED, Event
from rollyard.core.lease import Attempt
from rollyard.core.protocols import SessionRecord
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store.calls import CommitCall
from rollyard.store.database import SmallOperation
from rollyard.testing.call_log import conversation
from tests.servers.postgres import PostgresServer

TURNS, RUN = 20, "run_load"
TICK = os.sysconf("SC_CLK_TCK")
TASK = Task(id="t", instruction="do it")


async def do_rollout(store: ry.Store, turn_s: float) -> None:
    """All that a worker writes of one."""
    lease = await store.claim(RUN, owner="w", ttl_s=60)
    assert lease is not None
    name = f"ro_{lease.attempt.id}"
    session = SessionRecord(
        rollout_id=name, key_hash=name.encode(), created_at=1.0, attempt_id=lease.attempt.id, fence=lease.fence
    )
    await store.save_session(session)
    trajectory, calls = conversation(name, TURNS)
    for added, _ in calls:
        took = random.expovariate(1 / turn_s)
        await asyncio.sleep(took)
        record = replace(added.record, received_at=1.0, finished_at=1.0 + took)
        await store.commit(record, added.nodes, added.blobs)
    await store.close_session(name, at=2.0)
    done = Rollout(id=name, run_id=RUN, task=TASK, calls=TURNS, verdict=Verdict(reward=1.0), trajectory=trajectory)
    await store.commit_rollout(
        done, lease=lease, last_events=[Event(at=1.0, name=COMMITTED, run_id=RUN, rollout_id=name)]
    )


class Meter:
    """The server's own counters. What its processes have used counts with those that ended."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    async def read(self) -> dict[str, float]:
        connection = await asyncpg.connect(self._server.url)
        try:
            transactions = await connection.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = 'drill'")
            statements = await connection.fetchval("SELECT sum(calls) FROM pg_stat_statements")
            log = await connection.fetchval("SELECT wal_bytes FROM pg_stat_wal")
        finally:
            await connection.close()
        first, *others = self._server.pids()
        cpu = sum(_ticks(pid, (11, 12)) for pid in others) + _ticks(first, (11, 12, 13, 14))
        return {
            "transactions": float(transactions),
            "statements": float(statements),
            "kB of log": float(log) / 1024,
            "ms of CPU": 1000 * cpu / TICK,
        }


def _ticks(pid: int, fields: tuple[int, ...]) -> int:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(words[n]) for n in fields)


async def measure(server: PostgresServer, at_once: int, count: int, turn_s: float) -> dict[str, float]:
    meter = Meter(server)
    async with ry.Store.open(server.url) as store:
        await store.create_run({}, id=RUN)
        owed = [Attempt(id=f"a{n}", run_id=RUN, task_id=f"t{n}", number=0) for n in range(count)]
        await store.add_attempts(RUN, owed)
        places = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with places:
                await do_rollout(store, turn_s)

        await asyncio.sleep(1)  # counters of the server are a moment behind
        before, began = await meter.read(), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        took = time.perf_counter() - began
        await asyncio.sleep(1)
        after = await meter.read()
        kept = await store.get_run(RUN)
        assert kept.scored == count
        await store.delete_run(RUN)
    writes = count * (TURNS + 4)
    return {"writes/s": writes / took, **{name: (after[name] - before[name]) / writes for name in before}}


def count_statements(server: PostgresServer) -> None:
    """It takes a library that a server loads when it starts."""

    async def ask(*statements: str) -> None:
        connection: Any = await asyncpg.connect(server.url)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(ask("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'"))
    server.stop("fast")
    server.start()
    asyncio.run(ask("CREATE EXTENSION pg_stat_statements"))


def compare(at_once: int, turn_s: float, rounds: int = 2) -> tuple[float, float]:
    """Seconds of the server's CPU for a transaction, and for a write in it."""
    server = PostgresServer()
    points: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    try:
        count_statements(server)
        uvloop.run(measure(server, 64, 64, 0.1))  # the server's first is another
        for shares in (False, True) * rounds:
            SmallOperation.shares = CommitCall.shares = shares
            points[shares].append(uvloop.run(measure(server, at_once, at_once, turn_s)))
    finally:
        SmallOperation.shares = CommitCall.shares = True
        server.close()
    mean = {s: {name: fmean(one[name] for one in found) for name in found[0]} for s, found in points.items()}
    for shares, found in mean.items():
        for name, value in found.items():
            way = "shared" if shares else "alone"
            note(f"{name}{'' if '/s' in name else ' of a write'}, {at_once} rollouts, {way}", value)
    cpu, transactions = ([mean[s][name] for s in (False, True)] for name in ("ms of CPU", "transactions"))
    transaction_ms = (cpu[0] - cpu[1]) / (transactions[0] - transactions[1])
    write_ms = cpu[0] - transaction_ms * transactions[0]
    note(f"ms of CPU of a transaction, {at_once} rollouts", transaction_ms)
    note(f"ms of CPU of a write in it, {at_once} rollouts", write_ms)
    return transaction_ms / 1000, write_ms / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="*", default=[256])
    parser.add_argument("--turn-s", type=float, default=2.0)
    options = parser.parse_args()
    for at_once in options.at_once:
        compare(at_once, options.turn_s)


if __name__ == "__main__":
    main()
