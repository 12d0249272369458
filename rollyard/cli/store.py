"""`rollyard store backup|restore`: a copy of a SQLite store while it is in use, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json

app = typer.Typer(help="back up and restore a store", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def store() -> None:
    """Back up and restore a store."""


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="file to create")],
    store: Annotated[
        str, typer.Option(help="store: a path or sqlite:///path; for PostgreSQL use pg_dump")
    ] = "rollyard.db",
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
    target: Annotated[str, typer.Argument(help="new or empty store: a path or postgresql://...")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Copy a whole store, with every id, into one of another kind: SQLite to PostgreSQL or back."""
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
