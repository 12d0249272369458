"""`rollyard view`: the page over a store."""

from __future__ import annotations

from typing import Annotated

import typer

from rollyard.cli.options import Port

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def view(
    store: Annotated[str, typer.Argument(help="a store: a file, or postgresql://...")] = "runs.db",
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Port = 8700,
    write: Annotated[bool, typer.Option(help="allow starting, cancelling and rescoring with a token")] = False,
    tasks: Annotated[str | None, typer.Option(help="with --write: tasks that can be chosen on the page")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the ready line as JSON")] = False,
) -> None:
    """Serve the page: runs, rollouts, trajectories, tokens. Read-only unless --write, which prints a token."""
    from rollyard.page.serve import serve_page

    serve_page(store, host=host, port=port, write=write, tasks=tasks, as_json=as_json, say=typer.echo)
