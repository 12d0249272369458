"""`rollyard continue`: an attempt that was cut, or ran out of its budget, goes on from its last recorded answer."""

from __future__ import annotations

import typer

from rollyard.cli.branch import DisplayOption, JsonOption, NameOption, PolicyOption, Rollout, SandboxOption, run_branch
from rollyard.cli.options import with_rollout_options
from rollyard.cli.store_option import StoreOption
from rollyard.core.branch_point import END
from rollyard.core.home import STORE
from rollyard.runs.rollout.options import RolloutFields

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("continue")
@with_rollout_options
def go_on(
    options: RolloutFields,
    rollout: Rollout,
    policy: PolicyOption = None,
    sandbox: SandboxOption = None,
    store: StoreOption = STORE,
    name: NameOption = "",
    display: DisplayOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Run a rollout again with all of its recorded answers, and go on from there.

    For one that ran out of time or budget, or whose model server failed. --max-calls counts the calls that are new.

    rollyard continue ROLLOUT --max-calls 50
    """
    from rollyard.runs.branch import BranchRequest

    request = BranchRequest(
        rollout=rollout,
        at=END,
        policy=policy,
        options=options,
        sandbox=sandbox,
        store=store,
        name=name,
        as_json=as_json,
    )
    run_branch(request, display)
