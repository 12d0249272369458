"""`rollyard watch`: a run as it goes, from any terminal that can reach its store."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def watch(
    run: Annotated[str | None, typer.Argument(help="run id, or the start of it; the newest run by default")] = None,
    store: StoreOption = STORE,
    display: Annotated[str, typer.Option(help="auto, table, rich, plain or json")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print events and rollouts as JSON Lines")] = False,
) -> None:
    """Follow a run in a table (j and k move, enter opens, f finds the next failure), or as lines until it ends.

    The table needs textual (the extra tui); without it, or without a terminal, lines are printed."""
    from rollyard.runs.display.watch import follow

    anyio.run(follow, store, run, "json" if as_json else display)
