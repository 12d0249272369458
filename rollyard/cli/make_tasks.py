"""`rollyard make-tasks REPO_OR_SDIST... --out DIR`: tasks out of Python packages, each with one fault that its tests find."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollyard.cli.main import ROLLOUTS_FAILED
from rollyard.cli.shared_options import fill
from rollyard.cli.verb_app import new_verb

app = new_verb()


@app.command("make-tasks")
def make_tasks(
    source: Annotated[
        list[str], typer.Argument(help="folders of packages with tests, their sdists, or git:PATH_OR_URL@COMMIT")
    ],
    out: Annotated[Path, typer.Option(help="new folder for the tasks")],
    count: Annotated[int, typer.Option("--n", min=1, help="how many tasks of each package")] = 50,
    seed: Annotated[int, typer.Option(help="another seed is another choice of faults")] = 0,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="only this kind of fault; may be repeated")] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", help="what it or its tests need, as NAME==VERSION of pip; may be repeated"),
    ] = None,
    image: Annotated[str, typer.Option(help="image that the tasks are based on")] = "host",
    sandbox: Annotated[str, typer.Option(help="sandbox backend to prove them on")] = "local",
    repeats: Annotated[int, typer.Option(min=1, help="how often tests must pass without a fault and fail with it")] = 2,
    parallel: Annotated[int, typer.Option("-j", "--parallel", min=1, help="faults tried at the same time")] = 2,
    timeout_s: Annotated[
        float, typer.Option("--test-timeout", min=1.0, help="seconds that all of the tests may take")
    ] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Make tasks out of packages: one fault in the source each, which the package's own tests find.

    A fault is kept where doing nothing fails and its repair passes, every time, and the agent can read no answer. The package's
    code runs in sandboxes alone. Exit code 1 when fewer tasks were made than asked for; the table says why.
    """
    from rollyard.cli.printing import print_json, print_table
    from rollyard.sandbox import backend as open_backend
    from rollyard.testing.make_tasks import MadeTasks, MakeOptions, TriedFault, tabulate, tabulate_packages
    from rollyard.testing.make_tasks import make_tasks as make

    options = fill(MakeOptions, locals())

    wanted = count * len(source)

    async def run() -> list[MadeTasks]:
        kept = 0

        def tell(fault: TriedFault) -> None:
            nonlocal kept
            kept = min(wanted, kept + (fault.reason is None))
            if not json:
                said = fault.reason or ("1 test fails" if fault.failing == 1 else f"{fault.failing} tests fail")
                typer.echo(f"{kept:4}/{wanted} {'made' if fault.reason is None else 'no':5} {fault.name}: {said}")

        async with open_backend(sandbox) as backend:
            return await make(source, out, backend, options, tell=tell)

    done = anyio.run(run)
    if json:
        print_json(done)
    else:
        rows = list(tabulate(done[0]) if len(done) == 1 else tabulate_packages(done))
        typer.echo("")
        if rows:
            print_table(list(rows[0]), [list(row.values()) for row in rows])
        for made in done:
            without = f", without {len(made.left_out)} that fail in any case" if made.left_out else ""
            tests = "1 test" if made.tests == 1 else f"{made.tests} tests"
            typer.echo(f"\n{len(made.made)} tasks in {out}, judged by {tests} of {made.package}{without}")
    if sum(len(made.made) for made in done) < wanted:
        raise typer.Exit(ROLLOUTS_FAILED)
