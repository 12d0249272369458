"""Appends of events side by side on PostgreSQL: `python -m bench.appends [--seconds N]`.

Writers append ten events at a time under a lease, as workers do: all for one run, for eight runs in one database, and for eight
runs in a database each. The last is what keeping runs apart could reach at best. The three take turns, so that ratios within one
line count and not the rates: writers and server share this machine. What a backend waited for is sampled meanwhile: a share of
`Lock` would mean that one writer waits until another commits.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import uvloop

from rollyard.core.events import Event
from rollyard.core.lease import Attempt, Lease
from rollyard.store import Store
from tests.servers.postgres import PostgresServer

WRITERS, RUNS, EVENTS, ROUNDS = (1, 8, 32), 8, 10, 3
LOOK_S = 0.02
WAITS = (
    "SELECT coalesce(wait_event_type, 'CPU'), count(*) FROM pg_stat_activity "
    "WHERE state = 'active' AND pid <> pg_backend_pid() GROUP BY 1"
)


class Side:
    """One of the three: a store and a claim for each writer, how many appends were done, and what they waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writers: list[tuple[Store, Lease]] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        self.done, self.spent_s = 0, 0.0
        self.waits: Counter[str] = Counter()

    def __str__(self) -> str:
        held = self.waits["Lock"] / (sum(self.waits.values()) or 1)
        return f"{self.done / self.spent_s:.0f} ({held:.0%})"

    async def append(self, writers: int, seconds: float, watch: asyncpg.Connection) -> None:
        began = time.perf_counter()
        until = began + seconds

        async def write(store: Store, lease: Lease) -> None:
            run = lease.attempt.run_id
            events = [
                (lease, Event(at=1.0, name="step", run_id=run, rollout_id=f"ro_{run}", fields={"number": number}))
                for number in range(EVENTS)
            ]
            while time.perf_counter() < until:
                await store.events_under(events)
                self.done += 1

        async def look() -> None:
            while True:
                self.waits.update({row[0]: row[1] for row in await watch.fetch(WAITS)})
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        await asyncio.gather(*(write(*one) for one in self.writers[:writers]))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        self.spent_s += time.perf_counter() - began


@asynccontextmanager
async def open_sides(server: PostgresServer) -> AsyncGenerator[tuple[list[Side], asyncpg.Connection]]:
    start = server.url.rpartition("/")[0]
    async with AsyncExitStack() as stack:
        admin = await asyncpg.connect(server.url)
        stack.push_async_callback(admin.close)
        urls: list[str] = []
        for number in range(2 + RUNS):
            await admin.execute(f"CREATE DATABASE side{number}")
            urls.append(f"{start}/side{number}")
        sides: list[Side] = []
        for name, databases, runs in (
            ("one run", urls[:1], 1),
            (f"{RUNS} runs", urls[1:2], RUNS),
            (f"{RUNS} runs, a database each", urls[2:], 1),
        ):
            side = Side(name)
            made = [await add_run(database, f"run_{number}") for database in databases for number in range(runs)]
            for number in range(max(WRITERS)):
                database, run = made[number % len(made)]
                store = await stack.enter_async_context(Store.open(database))
                lease = await store.claim(run, owner=f"w{number}", ttl_s=3600)
                assert lease is not None
                side.writers.append((store, lease))
            sides.append(side)
        yield sides, admin


async def add_run(database: str, run: str) -> tuple[str, str]:
    async with Store.open(database) as store:
        await store.create_run({}, id=run)
        owed = [Attempt(id=f"{run}_{n}", run_id=run, task_id=f"t{n}", number=0) for n in range(max(WRITERS))]
        await store.add_attempts(run, owed)
    return database, run


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each side in each round")
    options = parser.parse_args()
    server = PostgresServer(large=True)
    print(f"appends of {EVENTS} events a second (share of looks that found a writer waiting for another's lock)")
    try:
        async with open_sides(server) as (sides, admin):
            print("| writers | " + " | ".join(side.name for side in sides) + " |\n|---|" + "---|" * len(sides))
            for writers in WRITERS:
                for side in sides:
                    side.begin_anew()
                for side in sides * ROUNDS:
                    await side.append(writers, options.seconds, admin)
                print(f"| {writers} | " + " | ".join(map(str, sides)) + " |", flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    uvloop.run(main())
