"""`rollyard show ID`: a run or a rollout, with its calls, events, verdict, log and diff."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


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
    id: Annotated[str, typer.Argument(help="run or rollout id, or the start of it")],
    part: Annotated[Part, typer.Option(help="part of a rollout to show")] = Part.ALL,
    store: StoreOption = STORE,
    log: Annotated[bool, typer.Option("--log", help="all that the agent printed; short for --part log")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what the store has of a run or a rollout."""
    from rollyard.cli.printing import print_json, print_text
    from rollyard.core.errors import ConfigError
    from rollyard.store.listing import ShownRun, show

    if log and part not in (Part.ALL, Part.LOG):
        raise typer.BadParameter(f"--log and --part {part} name two parts")
    found = anyio.run(show, store, id)
    shown = str(Part.LOG if log else part)
    if shown != Part.ALL and isinstance(found, ShownRun):
        raise ConfigError(
            f"{id} is a run, and --{'log' if log else 'part'} is for a rollout",
            hint=f"`rollyard list {id}` lists its rollouts",
        )
    if json:
        print_json(found.document(shown))
    elif shown == Part.ALL:
        print_text(found.text(shown))
    else:
        typer.echo(found.text(shown))
