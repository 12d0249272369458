"""`rollyard show ID`: a run or a rollout, with its calls, events, verdict, log and diff."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import anyio
import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Part(StrEnum):
    ALL = "all"
    CALLS = "calls"
    MESSAGES = "messages"
    EVENTS = "events"
    VERDICT = "verdict"
    LOG = "log"
    DIFF = "diff"
    FILES = "files"


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="a run or a rollout, or the start of its id")],
    part: Annotated[Part, typer.Option(help="only one part of a rollout")] = Part.ALL,
    store: Annotated[str, typer.Option(help="a path or a postgresql:// address")] = "runs.db",
    json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show what is kept of a run or a rollout."""
    from rollyard.cli.printing import print_json
    from rollyard.store.listing import show

    found = anyio.run(show, store, id)
    if json:
        print_json(found.document(str(part)))
    else:
        typer.echo(found.text(str(part)))
