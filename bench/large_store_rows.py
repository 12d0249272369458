"""The rows of a large store: a hundred rollouts of ten calls are committed as always, and their rows multiplied.

Each copy has ids and bodies of its own. Half of all are one run's (`BIG`), the others are ten runs'.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import Table

from bench.page import rollouts
from rollyard.core.call import Call, Reply, Usage, floats, ids
from rollyard.core.events import COMMITTED, Event
from rollyard.core.lease import Attempt
from rollyard.core.message import Message, Text, ToolCall, ToolResult
from rollyard.store import Store, schema
from rollyard.trajectory.trajectory import Trajectory

CALLS, MODELS = 10, 100  # calls of a rollout; rollouts that are multiplied
RUN, COPY = "run_000", "c000000"  # what each copy has its own of
BIG = "run_000"
TABLES = ("rollouts", "calls", "blobs", "verdicts", "attempts", "events", "texts")
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
                answer = Message("assistant", (Text(f"step {turn}"), tool))
                call = Call(
                    id=f"call_{COPY}_{number:02}_{turn:02}", rollout_id=name, dialect="chat", model="m",
                    messages=tuple(messages), raw=b'{"at": "%s/%d/%d"}' % (b"x" * 300, number, turn), received_at=1.0 + turn,
                )  # fmt: skip
                reply = Reply(
                    message=answer, finish="tool_calls", prompt_ids=prompt, completion_ids=ids(range(30)), capture="tokens",
                    logprobs=floats([-0.5] * 30), raw=b'{"answer": "%s/%d/%d"}' % (b"y" * 300, number, turn),
                    usage=Usage(prompt_tokens=len(prompt), completion_tokens=30), finished_at=2.0 + turn,
                )  # fmt: skip
                added = trajectory.add(call, reply)
                await store.commit(added.record, added.nodes, added.blobs)
                messages += [answer, Message("tool", (ToolResult(f"t{turn}", (Text(f"output {number} of {turn}"),)),))]
                prompt = prompt + ids(range(60))
            await store.add_attempts(
                RUN,
                [Attempt(id=f"a_{COPY}_{number:02}", run_id=RUN, task_id=line.task.id, number=number, state="done")],
            )
            line = type(line)(
                **{f: getattr(line, f) for f in line.__struct_fields__}
                | {"id": name, "calls": CALLS, "trajectory": trajectory, "log_tail": "last words " * 20}
            )
            events = [Event(at=1.0, name=COMMITTED, run_id=RUN, rollout_id=name, fields={"reward": line.reward})]
            await store.commit_rollout(line, last_events=events)


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
    """Half of all are one run's; the others are ten runs'."""
    return BIG if number < copies / 2 else f"run_{1 + number * 20 // copies:03}"


def fill_sqlite(path: Path, source: Copies, copies: int) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-500000")
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
