"""`rollyard branch`: a kept rollout up to one of its calls, and from there on with a policy's own answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED
from rollyard.cli.options import with_rollout_options
from rollyard.cli.shared_options import StoreOption, fill
from rollyard.cli.verb_app import new_verb
from rollyard.core.branch_point import How
from rollyard.core.home import STORE
from rollyard.runs.rollout.options import RolloutFields

if TYPE_CHECKING:
    from rollyard.runs.branch import BranchRequest

app = new_verb()

Rollout = Annotated[str, typer.Argument(help="rollout id, or the start of it")]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="what answers from there on: scripted:FILE, upstream:URL, tokens:URL (unset: what its run had)"),
]
SandboxOption = Annotated[str | None, typer.Option(help="sandbox backend (unset: the rollout's own)")]
NameOption = Annotated[str, typer.Option(help="name of the new run, by which other verbs find it")]
DisplayOption = Annotated[str, typer.Option(help="auto, rich, plain, json or none")]
JsonOption = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.command()
@with_rollout_options
def branch(
    options: RolloutFields,
    rollout: Rollout,
    at: Annotated[
        str,
        typer.Option(help="the call to answer anew: its id, the start of it, or its number in `rollyard show`"),
    ],
    n: Annotated[int, typer.Option("--n", help="how many times")] = 1,
    how: Annotated[
        How,
        typer.Option(
            help="resume: from the agent's own session, in a snapshot of that call (--snapshot-every); replay: by running its "
            "commands again; auto: resume where that can be"
        ),
    ] = "auto",
    answer: Annotated[
        str | None,
        typer.Option(
            help="what the model is to have said at that call: the text, @FILE, or JSON with text and tool_calls; the "
            "policy answers from the next call on"
        ),
    ] = None,
    policy: PolicyOption = None,
    parallel: Annotated[
        str | None, typer.Option(help="rollouts at the same time, or auto (unset: as in its run)")
    ] = None,
    sandbox: SandboxOption = None,
    store: StoreOption = STORE,
    name: NameOption = "",
    display: DisplayOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Run a rollout again with its recorded answers up to a call; from there on a policy answers.

    Every call before it is compared with the recorded one; a rollout that asks something else fails with the difference.
    Options are those of the rollout's run unless they are given.

    rollyard branch ROLLOUT --at 4 --n 8 --base-url http://localhost:8000/v1
    """
    from rollyard.runs.branch import BranchRequest
    from rollyard.runs.run.command import read_parallel

    at_once = None if parallel is None else read_parallel(parallel)
    run_branch(fill(BranchRequest, locals(), parallel=at_once), display)


def run_branch(request: BranchRequest, display: str) -> None:
    """Show it while it goes on, print its outcome, and exit as `rollyard run` does."""
    from rollyard.runs.branch import execute
    from rollyard.runs.display.progress import display as make_display
    from rollyard.runs.run.command import store_option
    from rollyard.runs.run.interrupt import run_interruptibly

    shown = make_display("none" if request.as_json and display == "auto" else display)
    resume = "rollyard run --resume {run}" + store_option(request.store)
    outcome = run_interruptibly(partial(execute, request, shown), display=shown, store=request.store, resume=resume)
    typer.echo(outcome.text, nl=False)
    if outcome.stopped:
        raise typer.Exit(INFRASTRUCTURE)
    if outcome.failed:
        raise typer.Exit(ROLLOUTS_FAILED)
