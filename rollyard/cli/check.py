"""`rollyard check agent|dataset|run|sandbox|tasks`: whether something does what it must, with the cases that fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED
from rollyard.cli.options import PullFrom
from rollyard.cli.printing import print_json, print_table
from rollyard.cli.shared_options import StoreOption, fill
from rollyard.cli.verb_app import new_group
from rollyard.core.home import STORE

if TYPE_CHECKING:
    from rollyard.testing.suite import CaseOutcome
    from rollyard.testing.tasks import TaskCheck

app = new_group()

Sandbox = Annotated[str, typer.Option(help="sandbox backend to prove them on")]
Repeats = Annotated[
    int, typer.Option("-n", "--repeats", min=1, help="runs of nop and oracle per task, to find flaky verifiers")
]
Parallel = Annotated[int, typer.Option("-j", "--parallel", min=1, help="tasks at the same time")]
Filter = Annotated[str | None, typer.Option("--filter", help="only tasks whose id matches this glob")]
TrustTasks = Annotated[
    bool, typer.Option("--trust-tasks", help="trust the authors of tasks from elsewhere with this machine")
]
Slow = Annotated[bool, typer.Option("--slow", help="include the cases that take minutes")]
Json = Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")]


@app.callback()
def check() -> None:
    """Check an agent, a dataset, a run, a sandbox backend or tasks, and say what passed and what failed."""


@app.command()
def agent(
    name: Annotated[str, typer.Argument(help="agent name (pi, codex, ...), package.module:attribute, or a TOML file")],
    sandbox: Annotated[str, typer.Option(help="sandbox backend to run it in")] = "local",
    user: Annotated[str | None, typer.Option(help="user of the image to run it as")] = None,
    only: Annotated[str | None, typer.Option(help="only the cases of one letter (T: tools) or one id (W1)")] = None,
    slow: Slow = False,
    figures: Annotated[
        bool, typer.Option("--figures", help="also measure a plain run: time, overhead, what the agent rewrites")
    ] = False,
    json: Json = False,
) -> None:
    """Run the conformance suite on an agent. Skipped cases give the reason. Exit code 3 when a case failed."""
    from rollyard.testing.agent.verdict import AgentTotals, examine_agent

    async def run() -> AgentTotals:
        async with examine_agent(name, sandbox, user) as examination:
            await _print_outcomes(examination.outcomes(only=only, slow=slow), json)
            if figures:
                await examination.measure()
            return examination.totals()

    totals = anyio.run(run)
    if json:
        print_json(totals)
    else:
        typer.echo(totals.line)
        if totals.figures is not None:
            seen = totals.figures
            typer.echo(
                f"wall {seen.wall_s:.2f} s, agent {seen.agent_s:.2f} s, overhead {seen.overhead_s * 1000:.0f} ms, "
                f"{seen.calls} calls, {seen.branches} branches, rewrites: {', '.join(seen.rewrites) or 'none'}"
            )
    if totals.failed:
        raise typer.Exit(INFRASTRUCTURE)


@app.command()
def dataset(
    name: Annotated[str, typer.Argument(help="dataset, NAME or NAME@VERSION, or anything that `check tasks` takes")],
    sample: Annotated[int, typer.Option(min=1, help="how many tasks to run, chosen by --seed")] = 10,
    seed: Annotated[int, typer.Option(help="another seed is another sample")] = 0,
    trivial: Annotated[
        bool, typer.Option("--trivial", help="also try empty, constant and echoed answers; none may solve a task")
    ] = False,
    sandbox: Sandbox = "local",
    repeats: Repeats = 2,
    parallel: Parallel = 2,
    only: Filter = None,
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
    keep_built: Annotated[
        bool, typer.Option("--keep-built", help="keep the images that are built, for a later run; else each is removed")
    ] = False,
    trust_tasks: TrustTasks = False,
    json: Json = False,
) -> None:
    """Check a dataset: load it, build a sample, and prove each task: doing nothing fails, its own solution passes, every time.

    Exit code 1 when a task of the sample fails; the table says why.
    """
    from rollyard.sandbox import backend as open_backend
    from rollyard.testing.dataset import DatasetCheck, check_dataset, dataset_table, summarise
    from rollyard.testing.tasks import CheckOptions

    options = fill(CheckOptions, locals(), filter=only)

    async def run() -> DatasetCheck:
        async with open_backend(sandbox) as backend:
            tell = partial(_print_task, json=json)
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
        raise typer.Exit(ROLLOUTS_FAILED)


@app.command()
def run(
    run: Annotated[str, typer.Argument(help="run id, or the start of it")],
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Check that every token is accounted for: prefix law, single training, logprobs, masks, bodies. Exit code 3 when a
    law is broken."""
    from rollyard.store.listing import check_run

    found = anyio.run(check_run, store, run)
    if json:
        print_json({"ok": found.ok, **{name: getattr(found, name) for name in found.__struct_fields__}})
    else:
        for name in found.__struct_fields__:
            value = getattr(found, name)
            if name != "findings":
                typer.echo(f"{name:16} {value if not hasattr(value, 'items') else _tally(value)}")
        for finding in found.findings:
            typer.echo(f"BROKEN  {finding.law}: {finding.rollout_id} {finding.where}: {finding.detail}")
        typer.echo("every law holds" if found.ok else f"{len(found.findings)} findings")
    if not found.ok:
        raise typer.Exit(INFRASTRUCTURE)


def _tally(value: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(value.items())) or "-"


@app.command()
def sandbox(
    name: Annotated[str, typer.Argument(help="backend name (local, docker, ...) or package.module:attribute")],
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE option of the backend; may be repeated")] = None,
    image: Annotated[str, typer.Option(help="image to open sandboxes from")] = "host",
    only: Annotated[str | None, typer.Option(help="only the cases of one letter (F: files) or one id (E9)")] = None,
    slow: Slow = False,
    json: Json = False,
) -> None:
    """Run the conformance suite on a backend. Skipped cases give the reason. Exit code 3 when a case failed."""
    from rollyard.testing.sandbox.verdict import SandboxTotals, examine_backend

    async def run() -> SandboxTotals:
        async with examine_backend(name, option or [], image) as examination:
            await _print_outcomes(examination.outcomes(only=only, slow=slow), json)
            return examination.totals()

    totals = anyio.run(run)
    if json:
        print_json(totals)
    else:
        typer.echo(totals.line)
    if totals.failed:
        raise typer.Exit(INFRASTRUCTURE)


@app.command()
def tasks(
    path: Annotated[str, typer.Argument(help="task folder, folder of tasks, dataset, JSON Lines or Python taskset")],
    sandbox: Sandbox = "local",
    repeats: Repeats = 2,
    parallel: Parallel = 2,
    only: Filter = None,
    lint_only: Annotated[bool, typer.Option("--lint", help="lint only; run nothing")] = False,
    network: Annotated[
        str, typer.Option("--network", help="what tasks may reach: task, none, allow:HOST,... or public")
    ] = "task",
    pull: PullFrom = None,
    trust_tasks: TrustTasks = False,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="accept options that weaken the sandbox")
    ] = False,
    json: Json = False,
) -> None:
    """Lint tasks and prove them: `nop` (do nothing) must fail each, `oracle` (the solution) must pass it.

    Exit code 1 when a task fails; the table says why.
    """
    from rollyard.sandbox import backend as open_backend
    from rollyard.testing.tasks import CheckOptions, as_table, check_tasks

    options = fill(CheckOptions, locals(), repeats=0 if lint_only else repeats, filter=only)

    async def run() -> list[TaskCheck]:
        found: list[TaskCheck] = []
        async with open_backend(sandbox) as backend:
            async for check in check_tasks(path, backend, options):
                found.append(check)
                _print_task(check, json)
                if not json:
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
        raise typer.Exit(ROLLOUTS_FAILED)


async def _print_outcomes(outcomes: AsyncIterator[CaseOutcome], json: bool) -> None:
    async for outcome in outcomes:
        if not json:
            why = f"  ({outcome.why})" if outcome.why else ""
            typer.echo(f"{outcome.result:8} {outcome.id:4} {outcome.title}{why}")


def _print_task(check: TaskCheck, json: bool) -> None:
    if not json:
        typer.echo(f"{'ok' if check.ok else 'FAILED':7} {check.task_id}")
