"""`rollyard check tasks PATH`: lint tasks, and prove that nothing fails them and their solution passes them."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.options import PullFrom


def tasks(
    path: Annotated[str, typer.Argument(help="task folder, folder of tasks, dataset, JSON Lines or Python taskset")],
    sandbox: Annotated[str, typer.Option(help="sandbox backend to prove them on")] = "local",
    repeats: Annotated[
        int, typer.Option("-n", "--repeats", min=1, help="runs of nop and oracle per task, to find flaky verifiers")
    ] = 2,
    parallel: Annotated[int, typer.Option("-j", "--parallel", min=1, help="tasks at the same time")] = 2,
    only: Annotated[str | None, typer.Option("--filter", help="only tasks whose id matches this glob")] = None,
    lint_only: Annotated[bool, typer.Option("--lint", help="lint only; run nothing")] = False,
    network: Annotated[
        str, typer.Option("--network", help="what tasks may reach: task, none, allow:HOST,... or public")
    ] = "task",
    pull: PullFrom = None,
    trust_tasks: Annotated[
        bool, typer.Option("--trust-tasks", help="trust the authors of tasks from elsewhere with this machine")
    ] = False,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="accept options that weaken the sandbox")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Lint tasks and prove them: `nop` must fail each, `oracle` must solve it, every time. Exit code 1 when a task fails."""
    from rollyard.cli.printing import print_json, print_table
    from rollyard.sandbox import backend as open_backend
    from rollyard.testing.tasks import CheckOptions, TaskCheck, as_table, check_tasks

    options = CheckOptions(
        repeats=0 if lint_only else repeats,
        parallel=parallel,
        network=network,
        pull=tuple(pull or ()),
        trust_tasks=trust_tasks,
        allow_unsafe=allow_unsafe,
        filter=only,
    )

    async def run() -> list[TaskCheck]:
        found: list[TaskCheck] = []
        async with open_backend(sandbox) as backend:
            async for check in check_tasks(path, backend, options):
                found.append(check)
                if not json:
                    typer.echo(f"{'ok' if check.ok else 'FAILED':7} {check.task_id}")
                    for finding in check.findings:
                        typer.echo(f"        {finding.level}: {finding.where}: {finding.message}")
        return sorted(found, key=lambda check: check.task_id)

    checks = anyio.run(run)
    if json:
        print_json(checks)
    elif checks:
        rows = as_table(checks)
        typer.echo("")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
