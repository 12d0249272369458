"""A store of 1 M calls in 100,000 rollouts, on SQLite and PostgreSQL: `python -m bench.large_store [--rollouts N]`.

Every verb that people ask such a store with runs in a process of its own: wall time, CPU and the most memory that the process
held. So do exports of half the store, a copy into a store of the other kind, and a pruning that removes that half. What grows
with the store instead of with the answer shows beside `--rollouts 2000`. PostgreSQL is a throw-away server with 32 MB of buffers
that waits for no disk; its own CPU and memory are not counted. Bytes lie in `TMPDIR` (about 10 GB at a time); `--at FOLDER`
keeps the SQLite store for the next call. `--ask` and `--write` do one half.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.figures import note
from bench.large_store_rows import BIG, CALLS, MODELS, Copies, add_runs, fill_postgres, fill_sqlite, make_models
from bench.page import measure, paths, peak_mb
from rollyard.store import Store
from rollyard.testing.postgres import PostgresServer

OTHER = "run_015"  # a tenth of the smaller half
REPORT = """
import asyncio, sys
from rollyard import Store
from rollyard.runs.report.report import report, text
async def main():
    async with Store.open(sys.argv[1], create=False) as store:
        print(text(await report(store, sys.argv[2])))
asyncio.run(main())
"""
LOOK_S = 0.02
ROLLYARD = (sys.executable, "-m", "rollyard")


class Asked(NamedTuple):
    """A command, and its budgets."""

    words: tuple[str, ...]
    wall_s: float | None = None
    peak_mb: float = 200.0
    codes: tuple[int, ...] = (0,)


def questions(count: int) -> dict[str, Asked]:
    one = f"ro_c{count // MODELS // 3:06}_07"
    return {
        "list": Asked(("list",), 5),
        "list RUN": Asked(("list", BIG), 5),
        "list RUN, in the middle": Asked(("list", BIG, "--offset", str(count // 4)), 5),
        "list RUN, by reward": Asked(("list", BIG, "--sort", "reward", "--descending"), 5),
        "list RUN, by status": Asked(("list", BIG, "--status", "infra_error"), 5),
        "list of every run, by agent": Asked(("list", "--agent", "pi"), 5),
        "show RUN": Asked(("show", BIG), 5),
        "show ROLLOUT": Asked(("show", one), 5),
        "show by the end of an id": Asked(("show", one[-8:]), 5),
        "why ROLLOUT": Asked(("why", one), 5),
        "why RUN": Asked(("why", BIG), 5),
        "compare RUN RUN": Asked(("compare", BIG, OTHER), 15),
        "compare RUN@ RUN@": Asked(("compare", f"{BIG}@small", f"{BIG}@large"), 15),
        "report of a run": Asked((BIG,), 60),
        "grep, found in each": Asked(("grep", "step", BIG), 5),
        "grep, found in a hundredth": Asked(("grep", "make step-77-3", BIG), 20),
        "grep, found nowhere": Asked(("grep", "no-such-words", BIG), 20, codes=(1,)),
        "grep of every run": Asked(("grep", "-l", "--limit", "20000", "make step-77-3"), 60),
        "clean --snapshots RUN": Asked(("clean", "--snapshots", BIG), 60),
        "store prune --dry-run": Asked(("store", "prune", "--older-than", "0", "--dry-run"), 5),
    }


def exports(folder: Path) -> dict[str, Asked]:
    out = {name: str(folder / f"out.{name}") for name in ("jsonl", "turns", "samples", "parquet", "html")}
    named = ("jsonl", "turns", "samples", "parquet")
    made = {f"export {n}": Asked(("export", BIG, "--out", out[n], "--format", n), peak_mb=300) for n in named}
    return made | {
        "export html": Asked(("export", OTHER, "--out", out["html"]), peak_mb=300),
        "scan RUN": Asked(("scan", OTHER), peak_mb=300, codes=(0, 1)),
        "check run RUN": Asked(("check", "run", OTHER), peak_mb=300),
    }


def do(kind: str, name: str, asked: Asked, store: str) -> None:
    """Run it, and note what it took."""
    words = (*ROLLYARD, *asked.words)
    if asked.words[:2] != ("store", "copy"):
        words += ("--store", store)
    if name.startswith("report"):
        words = (sys.executable, "-c", REPORT, store, *asked.words)
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, text=True)
        while True:
            # not the kernel's own count at the end: that begins with what the parent of the process held
            with suppress(OSError, StopIteration):
                peak = max(peak, peak_mb(process.pid))
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(LOOK_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        if process.returncode not in asked.codes:
            said.seek(0)
            print(f"{kind}: {name}: exit {process.returncode}: {said.read()[-500:]}", flush=True)
    note(f"s, {kind}: {name}", wall, asked.wall_s)
    note(f"s of CPU, {kind}: {name}", used.ru_utime + used.ru_stime)
    note(f"MB, {kind}: {name}", peak, asked.peak_mb)


def ask(kind: str, store: str, folder: Path, count: int) -> None:
    for name, asked in questions(count).items():
        do(kind, name, asked, store)
    pages = paths(BIG, f"ro_c{count // MODELS // 3:06}_07", count // 2, CALLS)
    del pages["raw call"]  # there is none of that name
    pages |= {"search, rare": "/search?q=%22step-77-3%22", "search, common": "/search?q=agent"}
    pages |= {"search in a run": f"/search?q=agent&run={OTHER}"}
    measure(store, pages, 1, f", {kind}")
    for name, asked in exports(folder).items():
        do(kind, name, asked, store)
        for made in folder.glob("out.*"):
            made.unlink()


@contextmanager
def sqlite_store(folder: Path, count: int) -> Iterator[str]:
    where, copies = folder / f"large-{count}.db", count // MODELS
    if not where.exists():
        making = where.with_suffix(".making")
        making.unlink(missing_ok=True)
        uvloop.run(make_runs(str(making), copies))
        fill_sqlite(making, models(folder), copies)
        making.rename(where)
    print(f"sqlite: {where.stat().st_size / 1e9:.1f} GB", flush=True)
    yield str(where)


@contextmanager
def postgres_store(folder: Path, count: int) -> Iterator[str]:
    server, copies = PostgresServer(durable=False), count // MODELS
    try:
        uvloop.run(make_runs(server.url, copies))
        uvloop.run(fill_postgres(server.url, models(folder), copies))
        yield server.url
    finally:
        server.close()


def models(folder: Path) -> Copies:
    path = folder / "models.db"
    if not path.exists():
        uvloop.run(make_models(path))
    return Copies(path)


async def make_runs(where: str, copies: int) -> None:
    async with Store.open(where) as store:
        await add_runs(store, copies)


def write(kind: str, store: str, folder: Path) -> None:
    """What changes a store, on a copy of it."""
    if kind == "sqlite":
        again = folder / "again.db"
        do(kind, "store backup", Asked(("store", "backup", str(again))), store)
        prune(kind, str(again))
        again.unlink()
        server = PostgresServer(durable=False)
        try:
            do(kind, "store copy to PostgreSQL", Asked(("store", "copy", store, server.url)), store)
        finally:
            server.close()
        return
    copied = folder / "copied.db"
    do(kind, "store copy to SQLite", Asked(("store", "copy", store, str(copied))), store)
    copied.unlink()
    prune(kind, store)


def prune(kind: str, store: str) -> None:
    """The oldest run goes, which is half of the store; then nothing is left to remove, and nothing may take long."""
    keep = ("store", "prune", "--older-than", "0", "--keep", "10")
    do(kind, "store prune of half", Asked(keep), store)
    do(kind, "store prune of nothing", Asked(keep), store)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    parser.add_argument("--at", type=Path, help="folder to keep the SQLite store in, and to find it in")
    parser.add_argument("--ask", action="store_true", help="what only reads")
    parser.add_argument("--write", action="store_true", help="backup, copy, prune")
    options = parser.parse_args(argv)
    both = not (options.ask or options.write)
    folder = options.at or Path(tempfile.mkdtemp(prefix="ry-bench-"))
    folder.mkdir(exist_ok=True)
    try:
        for kind, make in (("sqlite", sqlite_store), ("postgresql", postgres_store)):
            if options.only not in (None, kind):
                continue
            began = time.perf_counter()
            with make(folder, options.rollouts) as store:
                print(f"{kind}: ready after {time.perf_counter() - began:.0f} s", flush=True)
                if options.ask or both:
                    ask(kind, store, folder, options.rollouts)
                if options.write or both:
                    write(kind, store, folder)
    finally:
        if options.at is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
