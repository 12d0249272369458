"""A store of 1 M calls in 100,000 rollouts, on SQLite and PostgreSQL: `python -m bench.large_store [--rollouts N]`.

A hundred rollouts of ten calls are committed as always; their rows are then multiplied, each copy under ids of its own and with
bodies of its own, half of them in one large run. Then wall times of what people ask for, the growth of memory in an export,
in a scan and in the removal of a run, and the longest transaction of that removal. PostgreSQL is a throw-away server with 32 MB
of buffers that
waits for no disk. Bytes lie in `TMPDIR` (about 10 GB for both).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import asyncpg
import uvloop
from sqlalchemy import Table

from bench.figures import note
from bench.page import measure, paths, rollouts
from bench.store import rss_kb
from rollyard.core.call import Call, Reply, Usage, floats, ids
from rollyard.core.events import COMMITTED, Event
from rollyard.core.lease import Attempt
from rollyard.core.message import Message, Text, ToolCall, ToolResult
from rollyard.runs.scan.scan import scan_run
from rollyard.store import Store, schema
from rollyard.store.exports import export
from rollyard.store.prune import prune
from rollyard.store.values import RolloutQuery
from rollyard.testing.postgres import PostgresServer
from rollyard.trajectory.trajectory import Trajectory

CALLS, MODELS = 10, 100  # calls of a rollout; rollouts that are multiplied
RUN, COPY = "run_000", "c000000"  # what each copy has its own of
BIG = "run_000"
TABLES = ("rollouts", "calls", "nodes", "blobs", "verdicts", "attempts", "events", "texts")
COUNTED = {"verdicts": "id", "events": "seq", "texts": "id"}  # columns that the database counts up
AT_ONCE = 20


async def make_models(path: Path) -> None:
    async with Store.open(path) as store:
        await store.create_run({"tasks": "bench", "agents": ["pi"], "policies": {"small": "upstream:u"}}, id=RUN)
        for number, line in enumerate(rollouts(RUN, MODELS)):
            name = f"ro_{COPY}_{number:02}"
            trajectory = Trajectory(name)
            messages = [Message("system", (Text("You are an agent. " * 10),)), Message("user", (Text("go on"),))]
            prompt = ids(range(100))
            for turn in range(CALLS):
                tool = ToolCall(f"t{turn}", "bash", f'{{"command":"make step-{number}-{turn}"}}')
                asked = Message("assistant", (Text(f"step {turn}"), tool))
                call = Call(
                    id=f"call_{COPY}_{number:02}_{turn:02}", rollout_id=name, dialect="chat", model="m",
                    messages=tuple(messages), raw=b'{"at": "%s/%d/%d"}' % (b"x" * 300, number, turn), received_at=1.0 + turn,
                )  # fmt: skip
                reply = Reply(
                    message=asked, finish="tool_calls", prompt_ids=prompt, completion_ids=ids(range(30)), capture="tokens",
                    logprobs=floats([-0.5] * 30), raw=b'{"answer": "%s/%d/%d"}' % (b"y" * 300, number, turn),
                    usage=Usage(prompt_tokens=len(prompt), completion_tokens=30), finished_at=2.0 + turn,
                )  # fmt: skip
                added = trajectory.add(call, reply)
                await store.commit(added.record, added.nodes, added.blobs)
                messages += [asked, Message("tool", (ToolResult(f"t{turn}", (Text(f"output {number} of {turn}"),)),))]
                prompt = prompt + ids(range(60))
            await store.add_attempts(
                RUN,
                [Attempt(id=f"a_{COPY}_{number:02}", run_id=RUN, task_id=line.task.id, number=number, state="done")],
            )
            line = type(line)(
                **{f: getattr(line, f) for f in line.__struct_fields__}
                | {"id": name, "calls": CALLS, "trajectory": trajectory, "log_tail": "last words " * 20}
            )
            told = [Event(at=1.0, name=COMMITTED, run_id=RUN, rollout_id=name, fields={"reward": line.reward})]
            await store.commit_rollout(line, told=told)


class Copies:
    """Rows of the models, each time under other ids and digests of the same length."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[str, tuple[list[str], list[tuple[Any, ...]]]] = {}
        with sqlite3.connect(path) as connection:
            for name in TABLES:
                table: Table = schema.metadata.tables[name]
                columns = [column.name for column in table.columns if column.name != COUNTED.get(name)]
                flags = [table.c[column].type.python_type is bool for column in columns]
                found = connection.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall()
                rows = [tuple(bool(v) if f else v for f, v in zip(flags, row, strict=True)) for row in found]
                self.rows[name] = columns, rows
        self.digests = [row[0] for row in self.rows["blobs"][1]]

    def make(self, name: str, number: int, run_id: str) -> Iterator[tuple[Any, ...]]:
        columns, rows = self.rows[name]
        mark, started = b"%04d" % number, columns.index("started_at") if name == "rollouts" else -1
        counts = columns.index({"rollouts": "attempt", "attempts": "number"}.get(name, columns[0]))
        copy = f"c{number:06}"

        def change(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace(COPY, copy).replace(RUN, run_id)
            if isinstance(value, bytes):
                if len(value) == 32:
                    return value[:28] + mark
                value = value.replace(COPY.encode(), copy.encode())
                if name in ("calls", "blobs"):
                    for digest in self.of(value):
                        value = value.replace(digest, digest[:28] + mark)
            return value

        for row in rows:
            changed = [change(value) for value in row]
            if started >= 0:
                changed[started] += number * 10
            if name in ("rollouts", "attempts"):
                changed[counts] += number * MODELS
            yield tuple(changed)

    def of(self, packed: bytes) -> list[bytes]:
        """Digests of bodies that a record names: 32 bytes after the mark of such a string."""
        found, at = [], packed.find(b"\xc4\x20")
        while at >= 0:
            found.append(packed[at + 2 : at + 34])
            at = packed.find(b"\xc4\x20", at + 2)
        return found


def run_of(number: int, copies: int) -> str:
    """Half of all are one run's; the others are twenty runs'."""
    return BIG if number < copies / 2 else f"run_{1 + number * 20 // copies:03}"


def fill_sqlite(path: Path, source: Copies, copies: int) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    connection.execute("PRAGMA synchronous=OFF")
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for start in range(0, copies, AT_ONCE):
        connection.execute("BEGIN")
        for name in TABLES:
            columns = source.rows[name][0]
            insert = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({','.join('?' * len(columns))})"
            for number in range(start, min(start + AT_ONCE, copies)):
                connection.executemany(insert, source.make(name, number, run_of(number, copies)))
        connection.execute("COMMIT")
    connection.execute("INSERT INTO texts_words(texts_words) VALUES('rebuild')")
    for _, sql in triggers:
        connection.execute(sql)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


async def fill_postgres(url: str, source: Copies, copies: int) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("DROP INDEX texts_words")
    for start in range(0, copies, AT_ONCE):
        for name in TABLES:
            numbers = range(start, min(start + AT_ONCE, copies))
            rows = [row for n in numbers for row in source.make(name, n, run_of(n, copies))]
            await connection.copy_records_to_table(name, records=rows, columns=source.rows[name][0])
    await connection.execute("CREATE INDEX texts_words ON texts USING gin (to_tsvector('simple', body))")
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


async def add_runs(store: Store, copies: int) -> None:
    config = {"tasks": "bench", "agents": ["pi", "codex"], "policies": {"small": "upstream:u", "large": "upstream:v"}}
    for run in sorted({run_of(number, copies) for number in range(copies)}):
        await store.create_run(config, id=run)


class Memory:
    """How much memory grew by while something ran."""

    async def __aenter__(self) -> Memory:
        gc.collect()
        self.before = self.peak = rss_kb()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        self.grown_mb = (max(self.peak, rss_kb()) - self.before) / 1000

    async def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, rss_kb())
            await asyncio.sleep(0.02)


async def ask(store: Store, kind: str, count: int) -> None:
    one = f"ro_c{count // MODELS // 3:06}_07"
    questions: dict[str, Callable[[], Awaitable[Any]]] = {
        "runs": lambda: store.list_runs(limit=50),
        "runs searched": lambda: store.list_runs(search="bench", sort="mean_reward"),
        "run": lambda: store.get_run(BIG),
        "first page": lambda: store.list_rollouts(RolloutQuery(run_id=BIG)),
        "page in the middle": lambda: store.list_rollouts(RolloutQuery(run_id=BIG, offset=count // 4)),
        "by reward": lambda: store.list_rollouts(RolloutQuery(run_id=BIG, sort="reward", descending=True)),
        "filtered": lambda: store.list_rollouts(RolloutQuery(run_id=BIG, status="infra_error", search="task-00")),
        "page of all runs": lambda: store.list_rollouts(RolloutQuery()),
        "failures": lambda: store.failures(BIG),
        "id by its start": lambda: store.resolve(one[:-1] + "7"),
        "rollout": lambda: store.get_rollout(one),
        "rare words": lambda: store.find_texts('"step-77-3"'),
        "common words": lambda: store.find_texts("agent"),
        "next events": lambda: store.events(run_id=BIG, after=count - 100),
    }
    for name, question in questions.items():
        began = time.perf_counter()
        await question()
        note(f"s, {kind}: {name}", time.perf_counter() - began, 1.0)


async def remove(store: Store, kind: str) -> None:
    """One run of a twentieth of all, as retention does it."""
    longest, write = 0.0, store.database.write

    async def timed(work: Any) -> Any:
        nonlocal longest
        began = time.perf_counter()
        try:
            return await write(work)
        finally:
            longest = max(longest, time.perf_counter() - began)

    store.database.write = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    await store.delete_run("run_015")
    print(f"{kind}: a run removed in {time.perf_counter() - began:.1f} s", flush=True)
    note(f"s, {kind}: longest transaction of a removal", longest, 5.0)
    async with Memory() as memory:
        began = time.perf_counter()
        found = await prune(store, before=0.0)
    print(f"{kind}: {found.bodies} bodies swept in {time.perf_counter() - began:.1f} s", flush=True)
    note(f"MB, {kind}: growth in a sweep", memory.grown_mb, 200.0)


async def examine(where: str, kind: str, folder: Path, count: int, format: Literal["parquet", "samples"]) -> None:
    async with Store.open(where) as store:
        await ask(store, kind, count)
        began = time.perf_counter()
        await export(store, "run_016", folder / "warm", format=format)
        async with Memory() as memory:
            began = time.perf_counter()
            done = await export(store, BIG, folder / kind, format=format)
        took = time.perf_counter() - began
        print(f"{kind}: {done.rollouts} rollouts, {done.rollouts * CALLS} calls exported in {took:.0f} s", flush=True)
        note(f"ms, {kind}: exported rollout", took / max(1, done.rollouts) * 1e3)
        note(f"MB, {kind}: growth in an export", memory.grown_mb, 100.0)
        await scan_run(where, "run_016")
        async with Memory() as memory:
            began = time.perf_counter()
            scanned = await scan_run(where, BIG)
        took = time.perf_counter() - began
        print(f"{kind}: {scanned.rollouts} rollouts scanned in {took:.0f} s", flush=True)
        note(f"MB, {kind}: growth in a scan", memory.grown_mb, 100.0)
        await remove(store, kind)


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    parser.add_argument("--format", choices=("parquet", "samples"), default="parquet", help="of the export")
    options = parser.parse_args(argv)
    copies = options.rollouts // MODELS
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as text:
        folder = Path(text)
        await make_models(folder / "models.db")
        source = Copies(folder / "models.db")
        if options.only != "postgresql":
            where = folder / "large.db"
            async with Store.open(where) as store:
                await add_runs(store, copies)
            began = time.perf_counter()
            await asyncio.to_thread(fill_sqlite, where, source, copies)
            size = where.stat().st_size / 1e9
            print(f"sqlite: {size:.1f} GB in {time.perf_counter() - began:.0f} s", flush=True)
            long = f"ro_c{copies // 3:06}_07"
            pages = paths(BIG, long, options.rollouts // 2, CALLS)
            del pages["raw call"]  # there is none of that name
            await asyncio.to_thread(measure, where, pages, 1, ", large store")
            await examine(str(where), "sqlite", folder, options.rollouts, options.format)
            where.unlink()
        if options.only != "sqlite":
            server = PostgresServer(durable=False)
            try:
                async with Store.open(server.url) as store:
                    await add_runs(store, copies)
                began = time.perf_counter()
                await fill_postgres(server.url, source, copies)
                print(f"postgresql: filled in {time.perf_counter() - began:.0f} s", flush=True)
                await examine(server.url, "postgresql", folder, options.rollouts, options.format)
            finally:
                server.close()


if __name__ == "__main__":
    uvloop.run(main())
