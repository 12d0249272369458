"""The trajectory graph and the store, in one run: `python -m bench.store [--full]`.

placing   CPU of `Trajectory.add` per agent turn (30-50 kB bodies, 6.5-11.5k prompt ids), first against twentieth turn, memory
          and stored bytes per turn beside what was received
commit    CPU per committed chat call (3 nodes, 2 bodies) with 64 callers and with one, beside its floor: the same rows put
          into SQLite by one executemany in one transaction; the rows alone, 64 to a transaction, beside a journal that takes
          64 with one write and is put into SQLite later
claims    CPU per lease handed out and settled, with 16 workers
export    CPU per row and the growth of memory while a run is written as Parquet; `--full` takes 10,000 rollouts

Ratios are of this run; figures of different runs do not compare.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sqlite3
import tempfile
import time
from pathlib import Path

import uvloop

from bench.figures import note
from rollyard.core.call import Call, Reply, floats, ids
from rollyard.core.lease import Attempt
from rollyard.core.message import Message, Text, ToolCall, ToolResult, ToolSpec, tools_digest
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.task import Task
from rollyard.store import Store
from rollyard.store.call_rows import call_row, split_bodies
from rollyard.store.exports import export
from rollyard.trajectory.trajectory import Trajectory

TURNS, ROLLOUTS = 20, 32
JOURNAL = 4096  # calls that a journal holds until they are put into the database
TOOLS = tuple(ToolSpec(f"tool{n}", "d" * 400, '{"x":"' + "y" * 400 + '"}') for n in range(8))
SYSTEM = Message("system", (Text("s" * 20_000),))


def rss_kb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4.096


def agent_turns(rollout_id: str, turns: int = TURNS):
    """Requests and answers of one agent, each decoded anew as the wire does; ids have the prefix property."""
    done: list[tuple[str, str]] = []
    prompt = list(range(6500))
    for turn in range(turns):
        messages = [SYSTEM, Message("user", (Text("fix it " * 50),))]
        for tool_id, text in done:
            messages.append(Message("assistant", (Text("a" * 200), ToolCall(tool_id, "tool1", '{"c":1}'))))
            messages.append(Message("tool", (ToolResult(tool_id, (Text(text),)),)))
        body = {"model": "m", "messages": [m.text or "o" * 800 for m in messages], "tools": "z" * 8000}
        call = Call(
            id=f"{rollout_id}-{turn}",
            rollout_id=rollout_id,
            dialect="chat",
            model="m",
            messages=tuple(messages),
            tools=TOOLS,
            tools_digest=tools_digest(TOOLS),
            raw=json.dumps(body).encode(),
        )
        completion = list(range(64))
        tool_id = f"{rollout_id}-t{turn}"
        raw = {"id": f"x{turn}", "choices": ["q" * 3000], "prompt_token_ids": prompt}
        yield (
            call,
            Reply(
                message=Message("assistant", (Text("a" * 200), ToolCall(tool_id, "tool1", '{"c":1}'))),
                prompt_ids=ids(prompt),
                completion_ids=ids(completion),
                logprobs=floats([-0.5] * 64),
                capture="tokens",
                raw=json.dumps(raw).encode(),
            ),
        )
        done.append((tool_id, "o" * 800))
        prompt = prompt + completion + list(range(200))


def measure_placement() -> None:
    spent = [0] * TURNS
    received = stored = 0
    kept: list[Trajectory] = []
    gc.collect()
    before = rss_kb()
    for n in range(ROLLOUTS):
        trajectory = Trajectory(f"r{n}")
        kept.append(trajectory)
        for turn, (call, reply) in enumerate(agent_turns(f"r{n}")):
            start = time.process_time_ns()
            added = trajectory.add(call, reply)
            spent[turn] += time.process_time_ns() - start
            received += len(call.raw) + len(reply.raw)
            own, shared = split_bodies(added.record, added.blobs)
            stored += sum(len(value) for value in call_row(added.record, added.nodes, own)[-2:] if value is not None)
            stored += sum(len(body) for body in shared.values())
        del call, reply, added
    gc.collect()
    turns = ROLLOUTS * TURNS
    first, last = (spent[turn] / ROLLOUTS / 1000 for turn in (0, TURNS - 1))
    note("us to place the first turn", first)
    note("us to place the twentieth turn, of larger bodies", last)
    note("kB of memory per turn", (rss_kb() - before) / turns)
    print(f"{stored / turns / 1000:.1f} kB kept per turn of {received / turns / 1000:.1f} kB received")


def chat_calls(count: int):
    system, user = Message("system", (Text("s" * 200),)), Message("user", (Text("u" * 100),))
    for n in range(count):
        trajectory = Trajectory(f"rollout_{n:026d}")
        call = Call(
            id=f"call_{n:026d}",
            rollout_id=trajectory.rollout_id,
            dialect="chat",
            model="m",
            messages=(system, user),
            raw=b'{"x":"%s%d"}' % (b"a" * 400, n),
        )
        reply = Reply(
            message=Message("assistant", (Text("hello world " * 5),)),
            prompt_ids=ids(range(120)),
            completion_ids=ids(range(64)),
            logprobs=floats([-0.5] * 64),
            capture="tokens",
            raw=b'{"r":"%s%d"}' % (b"b" * 3000, n),
        )
        yield trajectory.add(call, reply)


async def commits(folder: Path, count: int, callers: int) -> float:
    waiting = iter(list(chat_calls(count)))
    async with Store.open(folder / f"commit{callers}.db") as store:

        async def caller() -> None:
            for added in waiting:
                await store.commit(added.record, added.nodes, added.blobs)

        start = time.process_time()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return (time.process_time() - start) / count * 1e6


def empty_store(path: Path) -> sqlite3.Connection:
    async def make() -> None:
        async with Store.open(path) as store:
            await store.create_run({}, id="floor")  # the first write makes the tables

    asyncio.run(make())
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("PRAGMA synchronous=NORMAL")
    raw.execute("PRAGMA wal_autocheckpoint=0")
    return raw


def bare_rows(path: Path, rows: list[tuple], group: int, journal_group: int = 0) -> float:
    """CPU per call of the rows alone, `group` to a transaction, checkpoints included; with a journal before them that takes
    `journal_group` calls with one write."""
    raw = empty_store(path)
    packed = [b"".join(bytes(part) for part in row[-3:] if part is not None) for row in rows]
    insert = f"INSERT INTO calls VALUES ({','.join('?' * len(rows[0]))})"
    with open(path.with_suffix(".journal"), "wb", buffering=0) as journal:
        start = time.process_time()
        for number in range(0, len(rows), group):
            if journal_group:
                journal.seek(0)
                for first in range(number, min(number + group, len(rows)), journal_group):
                    journal.write(b"".join(packed[first : first + journal_group]))
            raw.execute("BEGIN IMMEDIATE")
            raw.executemany(insert, rows[number : number + group])
            raw.execute("COMMIT")
            if (number + group) % JOURNAL == 0:
                raw.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        spent = time.process_time() - start
    raw.close()
    return spent / len(rows) * 1e6


def journal_or_not(folder: Path) -> None:
    """Whether an append-only journal that is put into the database later would cost less than putting calls there at once."""
    rows = [call_row(added.record, added.nodes, added.blobs) for added in chat_calls(4 * JOURNAL)]
    found = [
        (bare_rows(folder / f"at-once{n}.db", rows, 64), bare_rows(folder / f"journal{n}.db", rows, JOURNAL, 64))
        for n in range(2)
    ]
    at_once, journal = map(min, zip(*found, strict=True))
    print(
        f"{at_once:.1f} us of CPU for a call's row, 64 to a transaction; {journal:.1f} us by a journal, {JOURNAL} later"
    )


async def measure_commits(folder: Path) -> None:
    rows = [call_row(added.record, added.nodes, added.blobs) for added in chat_calls(6400)]
    lowest = await asyncio.to_thread(bare_rows, folder / "floor.db", rows, len(rows))
    await asyncio.to_thread(journal_or_not, folder)
    many = await commits(folder, 6400, 64)
    one = await commits(folder, 640, 1)
    note("us of CPU per commit, 64 callers", many)
    note("CPU of a commit, 64 callers / its bare rows", many / lowest)
    note("us of CPU per commit, one caller", one)


async def claims(folder: Path, count: int = 2000) -> None:
    async with Store.open(folder / "claims.db") as store:
        run = await store.create_run({})
        await store.add_attempts(
            run, (Attempt(id=f"a{n}", run_id=run, task_id=f"t{n}", number=0) for n in range(count))
        )
        task = Task(id="t", instruction="x")

        async def worker(name: str) -> None:
            while (lease := await store.claim(run, owner=name, ttl_s=60)) is not None:
                done = Rollout(id=f"ro-{lease.attempt.id}", task=task, run_id=run, verdict=Verdict(reward=1.0))
                await store.commit_rollout(done, lease=lease)

        start = time.process_time()
        await asyncio.gather(*(worker(f"w{n}") for n in range(16)))
        note("us of CPU per attempt claimed and settled", (time.process_time() - start) / count * 1e6)


async def measure_exports(folder: Path, count: int) -> None:
    async with Store.open(folder / "export.db") as store:
        run = await store.create_run({})
        task = Task(id="t", instruction="x")
        for n in range(count):
            trajectory = Trajectory(f"ro{n:06}")
            for call, reply in agent_turns(trajectory.rollout_id, 3):
                added = trajectory.add(call, reply)
                await store.commit(added.record, added.nodes, added.blobs)
            done = Rollout(id=trajectory.rollout_id, task=task, run_id=run, verdict=Verdict(reward=1.0), calls=3)
            await store.commit_rollout(done)
        await export(store, await store.create_run({}), folder / "warm.parquet")
        gc.collect()
        before = rss_kb()
        peak = before
        start = time.process_time()

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, rss_kb())
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        done = await export(store, run, folder / "rows.parquet")
        watching.cancel()
        seconds = time.process_time() - start
        print(f"export    {done.rows} rows of about 7,000 tokens")
        note("ms of CPU per exported row", seconds / done.rows * 1e3)
        note("MB that memory grew by in an export", (peak - before) / 1000)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="export 10,000 rollouts instead of 500")
    options = parser.parse_args()
    measure_placement()
    with tempfile.TemporaryDirectory(prefix="ry-bench-") as folder:
        await measure_commits(Path(folder))
        await claims(Path(folder))
        await measure_exports(Path(folder), 10_000 if options.full else 500)


if __name__ == "__main__":
    uvloop.run(main())
