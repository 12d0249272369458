"""`rollyard list [RUN]`: the runs of a store, or the rollouts of a run."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import anyio
import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("list")
def list_(
    run: Annotated[str, typer.Argument(help="run id, or the start of it; without it all runs are listed")] = "",
    store: Annotated[str, typer.Option(help="store: a path or postgresql://...")] = "runs.db",
    task: Annotated[str | None, typer.Option(help="only rollouts of this task")] = None,
    agent: Annotated[str | None, typer.Option(help="only rollouts of this agent")] = None,
    status: Annotated[
        str | None, typer.Option(help="only this status: completed, agent_error, infra_error, timeout, ...")
    ] = None,
    sort: Annotated[
        str, typer.Option(help="column to sort by: started_at, task_id, reward, status, calls, wall_s")
    ] = "started_at",
    descending: Annotated[bool, typer.Option("--descending", help="largest first")] = False,
    limit: Annotated[int, typer.Option(help="rows per page")] = 50,
    offset: Annotated[int, typer.Option(help="rows to skip")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List runs, newest first, or the rollouts of one run."""
    from rollyard.cli.printing import print_json, print_table
    from rollyard.store.listing import page, runs

    if not run:
        found = anyio.run(runs, store, limit, offset)
        if json:
            print_json(found)
            return
        rows = [
            [r.id, _time(r.created_at), str(r.rollouts), _states(r.attempts), _number(r.mean_reward)] for r in found
        ]
        print_table(["run", "created", "rollouts", "attempts", "reward"], rows)
        return
    chosen = {"task_id": task, "agent": agent, "status": status, "sort": sort, "descending": descending}
    shown = anyio.run(page, store, run, {**chosen, "limit": limit, "offset": offset})
    if json:
        print_json(shown)
        return
    rows = [
        [r.id, r.task_id, str(r.attempt), r.agent, r.status, _number(r.reward), str(r.calls), f"{r.wall_s:.1f}"]
        for r in shown.rows
    ]
    print_table(["rollout", "task", "#", "agent", "status", "reward", "calls", "s"], rows)
    if shown.next is not None:
        typer.echo(f"{shown.total} rollouts in all; for the next page add --offset {shown.next}")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _states(attempts: Any) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(attempts.items())) or "-"
