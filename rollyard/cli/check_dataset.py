"""`rollyard check dataset NAME`: whether a sample of a dataset loads, builds, and is judged as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from rollyard.cli.options import PullFrom


def dataset(
    name: Annotated[str, typer.Argument(help="dataset, NAME or NAME@VERSION, or anything that `check tasks` takes")],
    sample: Annotated[int, typer.Option(min=1, help="how many tasks to run, chosen by --seed")] = 10,
    seed: Annotated[int, typer.Option(help="another seed is another sample")] = 0,
    trivial: Annotated[
        bool, typer.Option("--trivial", help="also try empty, constant and echoed answers; none may solve a task")
    ] = False,
    sandbox: Annotated[str, typer.Option(help="sandbox backend to prove them on")] = "local",
    repeats: Annotated[
        int, typer.Option("-n", "--repeats", min=1, help="runs of nop and oracle per task, to find flaky verifiers")
    ] = 2,
    parallel: Annotated[int, typer.Option("-j", "--parallel", min=1, help="tasks at the same time")] = 2,
    only: Annotated[str | None, typer.Option("--filter", help="only tasks whose id matches this glob")] = None,
    network: Annotated[
        str, typer.Option("--network", help="what builds and tasks may reach: task, none, allow:HOST,... or public")
    ] = "task",
    build_network: Annotated[
        str | None, typer.Option("--build-network", help="what builds alone may reach: none, allow:HOST,... or public")
    ] = None,
    pull: PullFrom = None,
    results: Annotated[
        Path | None,
        typer.Option(help="a file to add each outcome to, as JSON; tasks that are in it are not run again"),
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="a folder for what verifiers printed and wrote, whole")] = None,
    trust_tasks: Annotated[
        bool, typer.Option("--trust-tasks", help="trust the authors of tasks from elsewhere with this machine")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Check a dataset: load it, build a sample, prove that nothing fails and its own solution passes, every time.

    Exit code 1 when a task of the sample fails; the table says why.
    """
    from rollyard.cli.printing import print_json, print_table
    from rollyard.sandbox import backend as open_backend
    from rollyard.testing.dataset import DatasetCheck, check_dataset, dataset_table, summarise
    from rollyard.testing.tasks import CheckOptions, TaskCheck

    options = CheckOptions(
        repeats=repeats,
        parallel=parallel,
        network=network,
        build_network=build_network,
        pull=tuple(pull or ()),
        logs=logs,
        trust_tasks=trust_tasks,
        filter=only,
        trivial=trivial,
    )

    async def run() -> DatasetCheck:
        def tell(check: TaskCheck) -> None:
            if not json:
                typer.echo(f"{'ok' if check.ok else 'FAILED':7} {check.task_id}")

        async with open_backend(sandbox) as backend:
            return await check_dataset(name, backend, options, sample=sample, seed=seed, results=results, tell=tell)

    found = anyio.run(run)
    if json:
        print_json({"summary": summarise(found), "dataset": found})
    else:
        rows = dataset_table(found)
        typer.echo("")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        typer.echo("")
        for key, value in summarise(found).items():
            typer.echo(f"{key:12} {value}")
    if not all(check.ok for check in found.checks):
        raise typer.Exit(1)
