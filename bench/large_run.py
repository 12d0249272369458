"""A run of 100,000 attempts of which all but a few are done: `python -m bench.large_run [--attempts N] [--owed M] [--only KIND]`.

Ten attempts are done as always; their rows are then multiplied inside the database, under ids and numbers of their own. Then
`rollyard run --resume` does what is owed, and once more when nothing is: how long it takes until it knows its run and until it
has reported, its CPU, and what its process holds meanwhile. SQLite, and a throw-away PostgreSQL that waits for no disk. The
agent is one bash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import asyncpg

from bench import thin_agent
from bench.drills.driver import ROLLYARD, PostgresServer, Upstream
from bench.figures import note
from bench.page import peak_mb

MODELS = 10
CONFIG = """
tasks = "{folder}/tasks.jsonl"
agents = ["{agent}"]
attempts = {models}
parallel = 4
model = "drill"
[policies]
policy = "upstream:{url}"
"""
# what is multiplied: the columns that a copy has its own of, with {n} for the number of the copy
COPIED = {
    "attempts": {
        "id": "id || '-' || {n}",
        "number": "number + {models} * {n}",
        "position": "position + {models} * {n}",
        "state": "CASE WHEN {models} * {n} + number < {done} THEN 'done' ELSE 'owed' END",
        "tries": "CASE WHEN {models} * {n} + number < {done} THEN tries ELSE 0 END",
        "fence": "CASE WHEN {models} * {n} + number < {done} THEN fence ELSE 0 END",
        "rollout_id": "CASE WHEN {models} * {n} + number < {done} THEN rollout_id || '-' || {n} END",
    },
    "rollouts": {
        "id": "id || '-' || {n}",
        "attempt": "attempt + {models} * {n}",
        "body": "replace(body, id, id || '-' || {n})",
    },
    "events": {"seq": None, "rollout_id": "rollout_id || '-' || {n}"},
}


def copy_statement(table: str, columns: list[str], copies: int, done: int, numbers: str) -> str:
    own = {name: text for name, text in COPIED[table].items() if text is not None}
    kept = [name for name in columns if name not in COPIED[table] or name in own]
    values = [own.get(name, name).format(n="copy.n", models=MODELS, done=done) for name in kept]
    whole = "" if table == "attempts" else f" WHERE copy.n < {done // MODELS}"
    return (
        f"INSERT INTO {table} ({', '.join(kept)}) SELECT {', '.join(values)} FROM {table} CROSS JOIN {numbers}{whole}"
    )


def multiply_sqlite(path: Path, copies: int, done: int) -> None:
    numbers = (
        f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {copies - 1}) SELECT n FROM c) copy"
    )
    with sqlite3.connect(path) as connection:
        for table in COPIED:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            connection.execute(copy_statement(table, columns, copies, done, numbers))


async def multiply_postgres(url: str, copies: int, done: int) -> None:
    connection = await asyncpg.connect(url)
    for table in COPIED:
        query = "SELECT column_name FROM information_schema.columns WHERE table_name = $1"
        columns = [row["column_name"] for row in await connection.fetch(query, table)]
        await connection.execute(
            copy_statement(table, columns, copies, done, f"generate_series(1, {copies - 1}) AS copy(n)")
        )
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


def command(*what: str, store: str) -> list[str]:
    return [str(ROLLYARD), "run", *what, "--store", store, "--display", "plain"]


def begin(store: str, config: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command(str(config), store=store), env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:] + done.stdout[-500:])
    return next(line.split()[1].rstrip(":") for line in done.stderr.splitlines() if line.startswith("run run_"))


def resume(kind: str, store: str, run_id: str, what: str, env: dict[str, str]) -> None:
    """Until it knows its run, until its last rollout, and until it has reported; and the most that its process held."""
    began, lines, peak, known = time.monotonic(), 0, 0.0, 0.0
    last = began
    words = command("--resume", run_id, store=store)
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.05):
                with suppress(OSError, StopIteration):
                    peak = max(peak, peak_mb(process.pid))

        threading.Thread(target=watch).start()
        for line in process.stderr:
            if line.startswith("run run_"):
                known = known or time.monotonic() - began
            elif run_id not in line:
                lines += 1
                last = time.monotonic()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
    print(f"{kind}: {lines} lines of rollouts, exit {process.returncode}")
    note(f"s, {kind}: until a resumed run is known, {what}", known, 10.0)
    if lines:
        note(f"s, {kind}: from its last rollout to its end", time.monotonic() - last, 15.0)
    note(f"s, {kind}: in all, {what}", time.monotonic() - began, 30.0)
    note(f"s of CPU, {kind}: {what}", used.ru_utime + used.ru_stime)
    note(f"MB, {kind}: most that its process held, {what}", peak, 300.0)


async def measure(kind: str, folder: Path, args: argparse.Namespace) -> None:
    upstream = Upstream()
    server = PostgresServer(durable=False) if kind == "postgresql" else None
    try:
        (folder / "tasks.jsonl").write_text('{"id": "t", "instruction": "hello", "verify": ["true"]}\n')
        config = folder / "run.toml"
        agent = thin_agent.write(folder)
        config.write_text(CONFIG.format(folder=folder, agent=agent, models=MODELS, url=upstream.url))
        (folder / "home").mkdir(exist_ok=True)
        env = {**os.environ, "ROLLYARD_HOME": str(folder / "home")}
        store = server.url if server else str(folder / "large.db")
        run_id = await asyncio.to_thread(begin, store, config, env)
        copies, done = args.attempts // MODELS, args.attempts - args.owed
        if server:
            await multiply_postgres(server.url, copies, done)
        else:
            await asyncio.to_thread(multiply_sqlite, folder / "large.db", copies, done)
        await asyncio.to_thread(resume, kind, store, run_id, f"{args.owed} owed", env)
        await asyncio.to_thread(resume, kind, store, run_id, "nothing owed", env)
    finally:
        upstream.close()
        if server:
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--owed", type=int, default=10)
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    args = parser.parse_args()
    for kind in (args.only,) if args.only else ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory(prefix="ry-large-run-") as folder:
            asyncio.run(measure(kind, Path(folder), args))


if __name__ == "__main__":
    main()
