"""`rollyard view`: the page over a store."""

from __future__ import annotations

from typing import Annotated

import typer

from rollyard.cli.shared_options import Port, StoreArgument
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def view(
    store: StoreArgument = STORE,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 8700,
    write: Annotated[
        bool, typer.Option(help="allow changes on the page (start, cancel, rescore), with a token that is printed")
    ] = False,
    tasks: Annotated[str | None, typer.Option(help="with --write: tasks offered on the page")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the ready line as JSON")] = False,
) -> None:
    """Serve a page with runs, rollouts, trajectories and tokens. It is read-only unless --write is given."""
    from rollyard.page.serve import PageOptions, serve_page
    from rollyard.plane.storage.sql import SqlPlane

    if tasks is not None and not write:
        raise typer.BadParameter("tasks are offered where runs may be started (add --write)", param_hint="--tasks")
    options = PageOptions(
        store=store, plane_records=SqlPlane, host=host, port=port, write=write, tasks=tasks, as_json=as_json
    )
    serve_page(options, say=typer.echo)
