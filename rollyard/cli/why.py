"""`rollyard why ROLLOUT`: the cause of its end, the evidence, and what to do."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def why(
    id: Annotated[
        str, typer.Argument(help="rollout, or a run for each of its failed rollouts: id, start of it, `last`")
    ],
    limit: Annotated[int, typer.Option(help="of a run: at most this many rollouts", min=1)] = 10,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say why a rollout failed: the cause, the evidence, and what to do.

    rollyard why last
    """
    from rollyard.cli.printing import print_json, print_text
    from rollyard.runs.report.why import explain_by_id

    found = anyio.run(explain_by_id, store, id, limit)
    if json:
        print_json(found.found)
    else:
        print_text(found.text())
