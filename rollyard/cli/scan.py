"""`rollyard scan RUN`: what in a run's rewards cannot be trusted, with the place that shows it."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.main import ROLLOUTS_FAILED
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE
from rollyard.core.ids import LAST

app = new_verb()


@app.command()
def scan(
    run: Annotated[str, typer.Argument(help="run: id, start of it, name or `last`")] = LAST,
    scanner: Annotated[list[str] | None, typer.Option(help="only this scanner; may be repeated")] = None,
    judge: Annotated[
        str | None, typer.Option(help="also ask a model, through this policy, e.g. upstream:http://localhost:8000/v1")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model id to ask the judge's server for")] = None,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Look over what agents did: tests or the grader touched, answers read, loops, refusals, a broken environment.

    Each finding says whether it invalidates a success, a failure or both. Exit code 1 when a reward is invalid.
    """
    from rollyard.cli.printing import print_json, print_text
    from rollyard.core.printable import printable
    from rollyard.runs.scan.scan import scan_run

    report = anyio.run(scan_run, store, run, tuple(scanner or ()), judge, model)
    if json:
        print_json(report)
    else:
        print_text(printable(report.text()))
    if report.invalid:
        raise typer.Exit(ROLLOUTS_FAILED)
