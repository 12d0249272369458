"""`rollyard store backup|restore`: a copy of a SQLite store while it is in use, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json

app = typer.Typer(help="keep a store safe", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def store() -> None:
    """Keep a store safe."""


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="a new file")],
    store: Annotated[str, typer.Option(help="a path or sqlite:///path; PostgreSQL has pg_dump")] = "rollyard.db",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """A consistent copy in one file, while servers and runs go on."""
    from rollyard.store import Store

    async def work() -> None:
        async with Store.open(store, create=False) as kept:
            await kept.backup(target)

    anyio.run(work)
    size = target.stat().st_size
    print_json({"backup": str(target), "bytes": size}) if as_json else typer.echo(f"{target}: {size} bytes")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a backup")],
    target: Annotated[Path, typer.Argument(help="where the store is to be; nothing may be there")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Put a backup where a store is to be, once it is proved whole."""
    from rollyard.store import Store

    anyio.run(Store.restore, source, target)
    print_json({"store": str(target)}) if as_json else typer.echo(f"{target} is there")
