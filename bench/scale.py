"""Many machines: what one rollout costs on a Ray cluster here, and where that leads.

    python -m bench.scale                    # measure at 1, 2 and 3 nodes, then model
    python -m bench.scale --model-only       # the model alone, from the constants kept in docs/capacity.json

Measured: real `ray start` nodes on this machine, a PostgreSQL server, `shell-agent` in local sandboxes and a scripted policy. All
nodes share this machine's cores, so rollouts/s cannot grow with nodes beyond them; what carries over to other machines are CPU
seconds and transactions per rollout. Modelled: a discrete-event simulation with those constants (`scale_model.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import msgspec

import rollyard as ry
from bench import transactions
from bench.scale_model import Constants, Site, simulate
from rollyard.core.events import Event
from rollyard.core.task import Task, VerifierSpec
from rollyard.runs import RunConfig
from rollyard.runs.run.executor import executor
from tests.servers.postgres import PostgresServer
from tests.servers.ray_cluster import RayCluster

KEPT = Path(__file__).parents[1] / "docs" / "capacity.json"
TICK = os.sysconf("SC_CLK_TCK")
STATS = "SELECT xact_commit, tup_inserted + tup_updated AS rows FROM pg_stat_database WHERE datname = 'drill'"


def cpu_s(pids: list[int], *, children: bool = False) -> float:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[n]) for n in ((11, 12, 13, 14) if children else (11, 12)))
    return total / TICK


class Meter:
    """CPU of the workers' loops, of sandboxes with all that ran in them, and of the database; transactions committed."""

    def __init__(self, cluster: RayCluster, postgres: PostgresServer, home: str) -> None:
        self.cluster, self.postgres, self.log = cluster, postgres, f"{home}/launcher.log"

    def _pids(self) -> tuple[list[int], list[int]]:
        workers: list[int] = []
        for node in self.cluster.nodes:
            for pid in node.pids():
                try:
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::NodeWorker"):
                        workers.append(pid)
                except OSError:
                    continue
        sandboxes: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "fd/2") == self.log:
                    sandboxes.append(int(entry.name))
            except OSError:
                continue
        return workers, sandboxes

    async def read(self) -> dict[str, float]:
        workers, sandboxes = await asyncio.to_thread(self._pids)
        connection = await asyncpg.connect(self.postgres.url, timeout=30)
        try:
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            row = await connection.fetchrow(STATS)
            wal = await connection.fetchval("SELECT wal_bytes FROM pg_stat_wal")
        finally:
            await connection.close()
        database = cpu_s(self.postgres.pids()) + cpu_s(self.postgres.pids()[:1], children=True)
        return {
            "worker": cpu_s(workers),
            "sandbox": cpu_s(sandboxes, children=True),
            "database": database,
            "transactions": float(row["xact_commit"]),
            "rows": float(row["rows"]),
            "wal_kb": float(wal) / 1024,
        }


def script(folder: Path, turns: int) -> str:
    path = folder / f"script{turns}.yaml"
    steps = ["steps:"] + ["  - shell: echo hello > out.txt"] * (turns - 1) + ["  - text: done"]
    path.write_text("\n".join(steps) + "\n")
    return f"scripted:{path}"


async def measure(
    cluster: RayCluster, postgres: PostgresServer, folder: Path, *, count: int, parallel: int, turns: int
) -> dict[str, float]:
    """The middle of a run: what its rollouts cost between the tenth part of them and the last."""
    check = VerifierSpec(kind="commands", options={"commands": ["test -f out.txt"]})
    tasks = [Task(id=f"t{n}", instruction="x", verifier=check) for n in range(count)]
    config = RunConfig(
        policies={"policy": script(folder, turns)}, agents=("shell-agent",), parallel=parallel, retries=5
    )
    meter = Meter(cluster, postgres, str(folder / "home"))
    where = executor("ray", address=cluster.address)
    async with (
        ry.Store.open(postgres.url) as store,
        ry.Run(tasks, config=config, store=store, executor=where) as run,
    ):
        skipped, began, first, done = count // 10, 0.0, {}, 0
        async for rollout in run:
            assert rollout.reward == 1.0, rollout.failure
            done += 1
            if done == skipped:
                began, first = time.monotonic(), await meter.read()
            if done == count - parallel:
                last, ended = await meter.read(), time.monotonic()
    rollouts = count - parallel - skipped
    per = {name: (last[name] - first[name]) / rollouts for name in first}
    return {"rollouts_per_s": rollouts / (ended - began), **per}


async def appends_per_s(postgres: PostgresServer, writers: int, each: int = 60) -> float:
    """Commits of ten events each, from processes' worth of connections at once, beside a reader that follows them."""
    batch = [Event(at=1.0, name="x", run_id="r", rollout_id="o", fields={"a": 1}) for _ in range(10)]

    async def write(store: ry.Store) -> None:
        for _ in range(each):
            await store.event(*batch)

    async def follow(store: ry.Store, after: int) -> None:
        async for _ in store.watch(run_id="r", after=after):
            pass

    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(ry.Store.open(postgres.url)) for _ in range(-(-writers // 16))]
        await asyncio.gather(*(stores[n % len(stores)].event(*batch) for n in range(writers)))
        following = asyncio.create_task(follow(stores[0], await stores[0].latest_event()))
        began = time.monotonic()
        await asyncio.gather(*(write(stores[n % len(stores)]) for n in range(writers)))
        took = time.monotonic() - began
        following.cancel()
        await asyncio.wait([following])
        return writers * each / took


async def appends(postgres: PostgresServer) -> None:
    for writers in (1, 8, 32, 64):
        print(f"{writers:3} writers: {await appends_per_s(postgres, writers):7.0f} appends/s", flush=True)


async def measure_nodes(nodes: list[int], count: int, per_node: int) -> tuple[list[dict], Constants]:
    rows: list[dict] = []
    for n in nodes:
        with tempfile.TemporaryDirectory(prefix="ry-scale-") as text:
            folder = Path(text)
            (folder / "home").mkdir()
            postgres = PostgresServer()
            try:
                with RayCluster(n, env={"ROLLYARD_HOME": str(folder / "home")}) as cluster:
                    for turns in (2, 12) if n == 1 else (2,):
                        found = await measure(
                            cluster, postgres, folder, count=count, parallel=per_node * n, turns=turns
                        )
                        rows.append({"nodes": n, "turns": turns, **found})
                        print(line(rows[-1]), flush=True)
                if n == nodes[-1]:
                    await appends(postgres)
            finally:
                postgres.close()
    short, long = rows[0], rows[1]
    call = {name: max(0.0, (long[name] - short[name]) / 10) for name in ("worker", "sandbox")}
    transaction_s, write_s = await asyncio.to_thread(transactions.compare, 256, 2.0)
    constants = Constants(
        worker_rollout_s=round(short["worker"] - 2 * call["worker"], 4),
        worker_call_s=round(call["worker"], 5),
        node_rollout_s=round(short["sandbox"] - 2 * call["sandbox"], 4),
        node_call_s=round(call["sandbox"], 4),
        store_txn_s=round(transaction_s, 6),
        store_write_s=round(write_s, 6),
    )
    return rows, constants


def line(row: dict) -> str:
    return (
        f"{row['nodes']} nodes, {row['turns']:2} turns: {row['rollouts_per_s']:6.2f} rollouts/s   CPU s per rollout: "
        f"worker {row['worker']:.3f}, sandbox {row['sandbox']:.3f}, database {row['database']:.3f}   per rollout: "
        f"{row['transactions']:.1f} transactions, {row['rows']:.1f} rows, {row['wal_kb']:.0f} kB of log"
    )


def model(constants: Constants, sizes: list[int], site: Site) -> list[str]:
    lines = []
    for size in sizes:
        found = simulate(constants, site, size)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(found.used.items(), key=lambda u: -u[1]))
        slow = found.wall_s * found.unhindered_per_s / size
        lines.append(
            f"{size:7} concurrent on {found.nodes:4} nodes: {found.rollouts_per_s:7.1f} rollouts/s, each {slow:.2f}x its "
            f"unhindered time; most used: {found.bottleneck} ({shares})"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=120, help="rollouts of each measurement")
    parser.add_argument("--per-node", type=int, default=6, help="rollouts at a time on a node here")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 3_000, 10_000, 30_000, 100_000])
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write docs/capacity.json")
    args = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if args.model_only:
        constants = msgspec.json.decode(KEPT.read_bytes(), type=Constants)
    else:
        _, constants = asyncio.run(measure_nodes(args.nodes, args.count, args.per_node))
    print(constants)
    if args.keep:
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(constants), indent=1) + b"\n")
    model(constants, args.sizes, Site())


if __name__ == "__main__":
    main()
