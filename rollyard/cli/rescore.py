"""`rollyard rescore`: judge kept rollouts again."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json, print_table
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def rescore(
    target: Annotated[str, typer.Argument(help="run or rollout id")],
    tasks: Annotated[
        str | None, typer.Option(help="take verifiers from these tasks instead of the stored ones")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="sandbox backend")] = "local",
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Run the verifier again on what each agent left. Agents do not run again; earlier verdicts are kept."""
    from rollyard.runs.rescore import Rescored
    from rollyard.runs.rescore import rescore as again
    from rollyard.store import Store
    from rollyard.tasks.taskset import Taskset

    async def work() -> list[Rescored]:
        newer = {task.id: task for task in Taskset.load(tasks)} if tasks is not None else None
        async with Store.open(store, create=False) as kept:
            return [row async for row in again(kept, target, sandbox=sandbox, tasks=newer)]

    rows = anyio.run(work)
    if as_json:
        print_json(rows)
        return
    cells = [(r.task_id, f"#{r.attempt}", _number(r.before), _number(r.after), r.error or "") for r in rows]
    print_table(("task", "attempt", "before", "after", "note"), cells)
    typer.echo(f"{sum(r.changed for r in rows)} of {len(rows)} changed")


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"
