"""`rollyard store backup|restore|copy|prune`: a copy of a SQLite store while it is in use, and back; and what is too old goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from rollyard.cli.printing import print_json
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_group
from rollyard.core.home import STORE, STORE_VARIABLE

app = new_group()


@app.callback()
def store() -> None:
    """Back up, restore, copy and prune a store."""


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="file to create")],
    store: Annotated[
        str,
        typer.Option(envvar=STORE_VARIABLE, help="store: a path or sqlite:///path; for PostgreSQL use pg_dump"),
    ] = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Write a consistent copy to one file, while servers and runs go on."""
    from rollyard.store import Store

    async def work() -> None:
        async with Store.open(store, create=False) as kept:
            await kept.backup(target)

    anyio.run(work)
    size = target.stat().st_size
    print_json({"backup": str(target), "bytes": size}) if as_json else typer.echo(f"{target}: {size} bytes")


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="store to copy: a path or postgresql://...; nothing may write to it")],
    target: Annotated[
        str, typer.Argument(help="new or empty store, or the same copy unfinished: a path or postgresql://...")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Copy a whole store, with every id, into one of another kind: SQLite to PostgreSQL or back. Broken off, the same command
    goes on where it was."""
    from rollyard.store.copy import copy_store

    counts = anyio.run(copy_store, source, target)
    total = sum(counts.values())
    print_json(counts) if as_json else typer.echo(f"{total} rows in {len(counts)} tables")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="backup file")],
    target: Annotated[Path, typer.Argument(help="path of the new store; it must not exist")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Create a store from a backup, after checking that the backup is intact."""
    from rollyard.store import Store

    anyio.run(Store.restore, source, target)
    print_json({"store": str(target)}) if as_json else typer.echo(f"restored to {target}")


@app.command()
def prune(
    older_than: Annotated[float, typer.Option("--older-than", help="remove runs older than this many days", min=0)],
    store: StoreOption = STORE,
    keep: Annotated[int, typer.Option("--keep", help="number of newest runs to keep whatever their age", min=0)] = 0,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="remove runs that have attempts left to run too")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be removed, and remove nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Remove old runs with their rollouts, calls, events and files. Unfinished ones stay, unless --unfinished is given."""
    import time

    from rollyard.core.numbers import count
    from rollyard.store import Store
    from rollyard.store.prune import Pruned, prune

    async def work() -> Pruned:
        async with Store.open(store, create=False) as kept:
            before = time.time() - older_than * 86400
            return await prune(kept, before=before, keep=keep, unfinished=unfinished, dry_run=dry_run)

    done = anyio.run(work)
    if as_json:
        print_json(msgspec.to_builtins(done))
        return
    verb = "would go" if dry_run else "removed"
    typer.echo(
        f"{verb}: {count(len(done.runs), 'run')}"
        + ("" if dry_run else f", {count(done.rollouts, 'rollout')}, {done.bodies or 0} bodies")
    )
    for run in done.runs if dry_run else ():
        typer.echo(f"  {run}")
    if done.unfinished:
        typer.echo(f"kept, since they owe attempts: {', '.join(done.unfinished)} (--unfinished removes them)")
    if done.left:
        typer.echo(f"bodies stay for now: {done.left}")
