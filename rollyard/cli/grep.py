"""`rollyard grep TEXT [RUN]`: where a text occurs in transcripts, tool calls, logs, verdicts and file changes."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.main import ROLLOUTS_FAILED
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def grep(
    text: Annotated[str, typer.Argument(help="text to look for")],
    run: Annotated[str, typer.Argument(help="run: id, start of it, name or `last`; without it every run")] = "",
    place: Annotated[
        list[str] | None,
        typer.Option(
            "--in", help="only in: message, tool call, tool result, log, verdict, failure, diff; may be repeated"
        ),
    ] = None,
    regex: Annotated[bool, typer.Option("--regex", "-e", help="the text is a regular expression")] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="ignore upper and lower case")] = False,
    names: Annotated[
        bool, typer.Option("--names", "-l", help="print only the ids of the rollouts, one per line")
    ] = False,
    limit: Annotated[int, typer.Option(help="stop after this many lines", min=1)] = 200,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
) -> None:
    """Search what rollouts said and did. Exit code 1 when nothing is found.

    rollyard grep "No module named" last --in "tool result"
    """
    from rollyard.runs.display.grep import print_found
    from rollyard.store.search import compile_text

    sought = compile_text(text, regex=regex, ignore_case=ignore_case)
    if not anyio.run(print_found, store, sought, run, tuple(place or ()), limit, names, json):
        raise typer.Exit(ROLLOUTS_FAILED)
