"""`rollyard replay`: a recorded rollout once more, answered from the recording."""

from __future__ import annotations

from typing import Annotated

import anyio
import msgspec
import typer

from rollyard.cli.main import ROLLOUTS_FAILED
from rollyard.cli.printing import print_json
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def replay(
    rollout: Annotated[str, typer.Argument(help="rollout id, or the start of it")],
    agent: Annotated[str | None, typer.Option(help="use this agent instead of the recorded one")] = None,
    strict: Annotated[bool, typer.Option(help="answer a call that differs from the recording with an error")] = False,
    sandbox: Annotated[str, typer.Option(help="sandbox backend")] = "local",
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Run the same task with the same agent, answer its calls from the recording, and print what differs."""
    from rollyard.runs.display.progress import one_line, summary
    from rollyard.runs.replay import Replayed
    from rollyard.runs.replay import replay as again
    from rollyard.store import Store

    async def work() -> Replayed:
        async with Store.open(store, create=False) as kept:
            return await again(kept, rollout, sandbox=sandbox, agent=agent, strict=strict)

    done = anyio.run(work)
    if as_json:
        differences = [msgspec.to_builtins(found) for found in done.mismatches]
        print_json({"original": done.original, "rollout": summary(done.rollout), "mismatches": differences})
    else:
        typer.echo(one_line(done.rollout))
        typer.echo("same calls as recorded" if done.same else f"{len(done.mismatches)} calls differ from the recording")
        for found in done.mismatches:
            typer.echo(f"\n{found.diff}")
    if done.rollout.failure is not None:
        raise typer.Exit(ROLLOUTS_FAILED)
