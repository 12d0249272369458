"""`rollyard import PATH`: what another system recorded, as a run."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command("import")
def import_(
    path: Annotated[
        str, typer.Argument(help="an Inspect log (.eval), an ATIF document (.json, .jsonl), or Harbor's job folder")
    ],
    format: Annotated[str | None, typer.Option(help="inspect, atif or harbor; by default from what PATH is")] = None,
    name: Annotated[str, typer.Option(help="name of the run; by default the file's")] = "",
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print a summary as JSON")] = False,
) -> None:
    """Keep what another system recorded as a run, to look at, search, compare and export.

    rollyard import logs/run.eval
    """
    from rollyard.cli.printing import print_json
    from rollyard.store.imports.load import import_run

    done = anyio.run(import_run, store, path, format, name)
    if json:
        print_json(done)
        return
    typer.echo(f"{done.rollouts} rollouts, {done.scored} with a reward, as run {done.run_id}")
