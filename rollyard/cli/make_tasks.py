"""`rollyard make-tasks REPO_OR_SDIST --out DIR`: tasks out of a Python package, each with one fault that its tests find."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollyard.cli.main import ROLLOUTS_FAILED

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("make-tasks")
def make_tasks(
    source: Annotated[str, typer.Argument(help="folder of a package with tests, its sdist, or git:PATH_OR_URL@COMMIT")],
    out: Annotated[Path, typer.Option(help="new folder for the tasks")],
    n: Annotated[int, typer.Option("--n", min=1, help="how many tasks")] = 50,
    seed: Annotated[int, typer.Option(help="another seed is another choice of faults")] = 0,
    kind: Annotated[list[str] | None, typer.Option(help="only this kind of fault; may be repeated")] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", help="what it or its tests need, as NAME==VERSION of pip; may be repeated"),
    ] = None,
    image: Annotated[str, typer.Option(help="image that the tasks are based on")] = "host",
    sandbox: Annotated[str, typer.Option(help="sandbox backend to prove them on")] = "local",
    repeats: Annotated[int, typer.Option(min=1, help="runs of nop and oracle per task, to find flaky tests")] = 2,
    parallel: Annotated[int, typer.Option("-j", "--parallel", min=1, help="faults tried at the same time")] = 2,
    test_timeout: Annotated[float, typer.Option(min=1.0, help="seconds that all of the tests may take")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Make tasks out of a package: one fault in its source each, which its own tests find.

    A fault is kept where doing nothing fails and its repair passes, every time, and the agent can read no answer. The package's
    code runs in sandboxes alone. Exit code 1 when fewer tasks were made than asked for; the table says why.
    """
    from rollyard.cli.printing import print_json, print_table
    from rollyard.sandbox import backend as open_backend
    from rollyard.tasks.synthesis.mutations import KINDS
    from rollyard.testing.make_tasks import MadeTasks, MakeOptions, TriedFault, tabulate
    from rollyard.testing.make_tasks import make_tasks as make

    options = MakeOptions(
        count=n,
        seed=seed,
        kinds=tuple(kind or KINDS),
        packages=tuple(packages or ()),
        image=image,
        repeats=repeats,
        parallel=parallel,
        timeout_s=test_timeout,
    )

    async def run() -> MadeTasks:
        kept = 0

        def tell(fault: TriedFault) -> None:
            nonlocal kept
            kept = min(n, kept + (fault.reason is None))
            if not json:
                said = fault.reason or ("1 test fails" if fault.failing == 1 else f"{fault.failing} tests fail")
                typer.echo(f"{kept:4}/{n} {'made' if fault.reason is None else 'no':5} {fault.name}: {said}")

        async with open_backend(sandbox) as backend:
            return await make(source, out, backend, options, tell=tell)

    made = anyio.run(run)
    if json:
        print_json(made)
    else:
        rows = list(tabulate(made))
        typer.echo("")
        if rows:
            print_table(list(rows[0]), [list(row.values()) for row in rows])
        without = f", without {len(made.left_out)} that fail in any case" if made.left_out else ""
        tests = "1 test" if made.tests == 1 else f"{made.tests} tests"
        typer.echo(f"\n{len(made.made)} tasks in {out}, judged by {tests} of {made.package}{without}")
    if len(made.made) < n:
        raise typer.Exit(ROLLOUTS_FAILED)
