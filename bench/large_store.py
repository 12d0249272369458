"""A store of 1 M calls in 100,000 rollouts, on SQLite and PostgreSQL: `python -m bench.large_store [--rollouts N]`.

Every verb that people ask such a store with runs in a process of its own: wall time, CPU and the most memory that the process
held. So do exports of half the store, a copy into a store of the other kind, and a pruning that removes that half. What grows
with the store instead of with the answer shows beside `--rollouts 2000`. PostgreSQL is a throw-away server with 32 MB of buffers
that waits for no disk; its own CPU and memory are not counted. Bytes lie in `TMPDIR` (about 7 GB at a time).

With `--at FOLDER` the bytes lie there, and so does every figure as soon as it is known: a call that was broken off or killed goes
on with the first step that has none. The SQLite store stays until its steps are done; PostgreSQL is filled again. A step that
takes longer than `LIMIT_S` is ended and named at the end. The whole takes about 15 minutes, so beside other work:

    nice -n 10 python -m bench.large_store --at FOLDER > FOLDER.log 2>&1 &
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench import figures
from bench.figures import note
from bench.large_store_rows import BIG, CALLS, MODELS, Copies, add_runs, fill_postgres, fill_sqlite, make_models
from bench.page import measure, paths, peak_mb
from rollyard.store import Store
from tests.servers.postgres import PostgresServer

KINDS = ("sqlite", "postgresql")
PRUNED = "store prune of nothing"
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
LIMIT_S = 3600.0  # of one command, on a busy machine
ROLLYARD = (sys.executable, "-m", "rollyard")


class Query(NamedTuple):
    """A command, and its budgets."""

    words: tuple[str, ...]
    wall_s: float | None = None
    peak_mb: float = 200.0
    codes: tuple[int, ...] = (0,)


def questions(count: int) -> dict[str, Query]:
    one = f"ro_c{count // MODELS // 3:06}_07"
    return {
        "list": Query(("list",), 5),
        "list RUN": Query(("list", BIG), 5),
        "list RUN, in the middle": Query(("list", BIG, "--offset", str(count // 4)), 5),
        "list RUN, by reward": Query(("list", BIG, "--sort", "reward", "--descending"), 5),
        "list RUN, by status": Query(("list", BIG, "--status", "infra_error"), 5),
        "list of every run, by agent": Query(("list", "--agent", "pi"), 5),
        "show RUN": Query(("show", BIG), 5),
        "show ROLLOUT": Query(("show", one), 5),
        "show by the end of an id": Query(("show", one[-8:]), 5),
        "why ROLLOUT": Query(("why", one), 5),
        "why RUN": Query(("why", BIG), 5),
        "compare RUN RUN": Query(("compare", BIG, OTHER), 15),
        "compare RUN@ RUN@": Query(("compare", f"{BIG}@small", f"{BIG}@large"), 15),
        "report of a run": Query((BIG,), 60),
        "grep, found in each": Query(("grep", "step", BIG), 5),
        "grep, found in a hundredth": Query(("grep", "make step-77-3", BIG), 20),
        "grep, found nowhere": Query(("grep", "no-such-words", BIG), 20, codes=(1,)),
        "grep of every run": Query(("grep", "-l", "--limit", "20000", "make step-77-3"), 60),
        "clean --snapshots RUN": Query(("clean", "--snapshots", BIG), 60),
        "store prune --dry-run": Query(("store", "prune", "--older-than", "0", "--dry-run"), 5),
    }


def exports(folder: Path) -> dict[str, Query]:
    out = {name: str(folder / f"out.{name}") for name in ("jsonl", "turns", "samples", "parquet", "html")}
    named = ("jsonl", "turns", "samples", "parquet")
    made = {f"export {n}": Query(("export", BIG, "--out", out[n], "--format", n), peak_mb=300) for n in named}
    return made | {
        "export html": Query(("export", OTHER, "--out", out["html"]), peak_mb=300),
        "scan RUN": Query(("scan", OTHER), peak_mb=300, codes=(0, 1)),
        # the copies' digests are not those of their bodies, and it says so of each
        "check run RUN": Query(("check", "run", OTHER), peak_mb=300, codes=(3,)),
    }


class Step(NamedTuple):
    """What is done to a store without a break, and the figure that it ends with: once that is known, the step is done."""

    last: str
    act: Callable[[str], None]


class Broken(Exception):
    """A command of the bench ended otherwise than it should."""


def do(kind: str, name: str, queries: Query, store: str) -> None:
    """Run it, and note what it took."""
    words = (*ROLLYARD, *queries.words)
    if queries.words[:2] != ("store", "copy"):
        words += ("--store", store)
    if name.startswith("report"):
        words = (sys.executable, "-c", REPORT, store, *queries.words)
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, text=True)
        try:
            while True:
                # not the kernel's own count at the end: that begins with what the parent of the process held
                with suppress(OSError, StopIteration):
                    peak = max(peak, peak_mb(process.pid))
                pid, status, used = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if time.perf_counter() - began > LIMIT_S:
                    raise Broken(f"it took longer than {LIMIT_S:g} s")
                time.sleep(LOOK_S)
        except BaseException:  # Ctrl-C too: the command does not outlive the measurement
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        if process.returncode not in queries.codes:
            said.seek(0)
            raise Broken(f"exit {process.returncode}: {said.read()[-500:]}")
    note(f"s, {kind}: {name}", wall, queries.wall_s)
    note(f"s of CPU, {kind}: {name}", used.ru_utime + used.ru_stime)
    note(last_figure(kind, name), peak, queries.peak_mb)


def last_figure(kind: str, name: str) -> str:
    return f"MB, {kind}: {name}"


def find_steps(kind: str, folder: Path, count: int) -> list[Step]:
    """All that is asked of a store of this kind, what changes it last."""
    queries = questions(count) | exports(folder)
    found = [Step(last_figure(kind, name), partial(do, kind, name, one)) for name, one in queries.items()]
    found.append(Step(page_figure(kind), partial(ask_pages, kind, count)))
    if kind == "sqlite":
        found.append(Step(last_figure(kind, PRUNED), partial(back_up_and_prune, kind, folder)))
        return [*found, Step(last_figure(kind, "store copy to PostgreSQL"), partial(copy_to_postgres, kind))]
    copied = Step(last_figure(kind, "store copy to SQLite"), partial(copy_to_sqlite, kind, folder))
    return [*found, copied, Step(last_figure(kind, PRUNED), partial(prune, kind))]


def page_figure(kind: str) -> str:
    return f"s of CPU for the slowest first page, {kind}"


def ask_pages(kind: str, count: int, store: str) -> None:
    pages = paths(BIG, f"ro_c{count // MODELS // 3:06}_07", count // 2, CALLS)
    del pages["raw call"]  # there is none of that name
    pages |= {"search, rare": "/search?q=%22step-77-3%22", "search, common": "/search?q=agent"}
    pages |= {"search in a run": f"/search?q=agent&run={OTHER}"}
    measure(store, pages, 1, f", {kind}")


def back_up_and_prune(kind: str, folder: Path, store: str) -> None:
    again = folder / "again.db"
    again.unlink(missing_ok=True)
    do(kind, "store backup", Query(("store", "backup", str(again))), store)
    prune(kind, str(again))
    again.unlink()


def copy_to_postgres(kind: str, store: str) -> None:
    server = PostgresServer(durable=False)
    try:
        do(kind, "store copy to PostgreSQL", Query(("store", "copy", store, server.url)), store)
    finally:
        server.close()


def copy_to_sqlite(kind: str, folder: Path, store: str) -> None:
    copied = folder / "copied.db"
    copied.unlink(missing_ok=True)
    do(kind, "store copy to SQLite", Query(("store", "copy", store, str(copied))), store)
    copied.unlink()


def prune(kind: str, store: str) -> None:
    """The oldest run goes, which is half of the store; then nothing is left to remove, and nothing may take long."""
    keep = ("store", "prune", "--older-than", "0", "--keep", "10")
    do(kind, "store prune of half", Query(keep), store)
    do(kind, PRUNED, Query(keep), store)


@contextmanager
def sqlite_store(folder: Path, count: int) -> Generator[str]:
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
def postgres_store(folder: Path, count: int) -> Generator[str]:
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


def take_steps(kind: str, folder: Path, count: int, where: Path) -> list[str]:
    """Those whose figures are not there yet; gives what is broken."""
    done = {figure.name for figure in figures.read(where)}
    left = [step for step in find_steps(kind, folder, count) if step.last not in done]
    broken: list[str] = []
    if not left:
        return broken
    began = time.perf_counter()
    with (sqlite_store if kind == "sqlite" else postgres_store)(folder, count) as store:
        print(f"{kind}: ready after {time.perf_counter() - began:.0f} s; {len(left)} steps", flush=True)
        for step in left:
            try:
                step.act(store)
            except (
                Exception
            ) as error:  # the other steps go on; this one is reported at the end, and tried again by the next call
                broken.append(f"{step.last}: {error}")
                print(broken[-1], flush=True)
            for made in folder.glob("out.*"):
                made.unlink()
    if not broken:
        (folder / f"large-{count}.db").unlink(missing_ok=True)
    return broken


def markdown(found: Sequence[figures.Figure]) -> str:
    """A line for each command: seconds of CPU and the most memory, by kind of store."""
    value = {figure.name: figure.value for figure in found}
    names = [figure.name.partition(": ")[2] for figure in found if figure.name.startswith("MB, ")]
    lines = ["| | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for name in dict.fromkeys(names):
        cells = [(value.get(f"s of CPU, {kind}: {name}"), value.get(last_figure(kind, name))) for kind in KINDS]
        shown = [f"{cpu:.1f} s, {peak:.0f} MB" if cpu and peak else "not measured" for cpu, peak in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument(
        "--at", type=Path, help="folder for the stores and the figures; a call that was broken off goes on there"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that servers end with it
    folder = options.at or Path(tempfile.mkdtemp(prefix="ry-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    where = folder / f"figures-{options.rollouts}"
    os.environ[figures.VARIABLE] = str(where)
    try:
        broken = [
            line
            for kind in KINDS
            if options.only in (None, kind)
            for line in take_steps(kind, folder, options.rollouts, where)
        ]
        found = list({figure.name: figure for figure in figures.read(where)}.values())
    finally:
        if options.at is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{figures.table(found, figures.read_baseline())}\n\n{markdown(found)}")
    for line in broken:
        print(f"BROKEN {line}")
    return 1 if broken or not all(figure.good for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
