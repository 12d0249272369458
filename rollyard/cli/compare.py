"""`rollyard compare`: two runs on the same tasks."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="run, or one agent or policy of it: RUN, RUN@AGENT, RUN@POLICY")],
    second: Annotated[str, typer.Argument(help="run, or part of a run, to compare it with; may be the same run")],
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare two runs, or two agents or policies of one run, task by task: difference with an interval, a paired test, and
    the tasks that flipped.

    rollyard compare last@small last@large
    """
    from rollyard.runs.report import compare as comparing
    from rollyard.store import Store

    async def work() -> None:
        async with Store.open(store, create=False) as kept:
            found = await comparing.compare(kept, first, second)
            if as_json:
                print_json(found.paired)
            else:
                typer.echo(comparing.text(first, second, found.paired), nl=False)

    anyio.run(work)
