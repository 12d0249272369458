"""`rollyard continue`: an attempt that was cut, or ran out of its budget, goes on from its last recorded answer."""

from __future__ import annotations

from rollyard.cli.branch import DisplayOption, JsonOption, NameOption, PolicyOption, Rollout, SandboxOption, run_branch
from rollyard.cli.options import with_rollout_options
from rollyard.cli.shared_options import StoreOption, fill
from rollyard.cli.verb_app import new_verb
from rollyard.core.branch_point import END
from rollyard.core.home import STORE
from rollyard.runs.rollout.options import RolloutFields

app = new_verb()


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

    run_branch(fill(BranchRequest, locals(), at=END), display)
