"""`rollyard list [RUN]`: the runs of a store, or the rollouts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, get_args

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command("list")
def list_(
    run: Annotated[
        str,
        typer.Argument(
            help="run: id, start or end of it, name or `last`; without it all runs are listed, or the rollouts of every run "
            "that the options choose"
        ),
    ] = "",
    store: StoreOption = STORE,
    task: Annotated[str | None, typer.Option(help="only rollouts of this task")] = None,
    agent: Annotated[str | None, typer.Option(help="only rollouts of this agent")] = None,
    policy: Annotated[str | None, typer.Option(help="only rollouts that this policy answered")] = None,
    status: Annotated[
        str | None, typer.Option(help="only this status: completed, agent_error, infra_error, timeout, ...")
    ] = None,
    sort: Annotated[
        str, typer.Option(help="column to sort by: started_at, task_id, reward, status, calls, wall_s, ...")
    ] = "started_at",
    descending: Annotated[bool, typer.Option("--descending", help="largest first")] = False,
    limit: Annotated[int, typer.Option(help="rows per page", min=1)] = 50,
    offset: Annotated[int, typer.Option(help="rows to skip", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List runs, newest first; or the rollouts of one run; or, with options, the rollouts of every run that match.

    On a terminal ids are shortened; every verb accepts short ids. In a pipe and with --json they are whole.

    rollyard list --status infra_error --policy large
    """
    from rollyard.cli.printing import print_json, print_table, show_id
    from rollyard.core.errors import UnknownName
    from rollyard.core.rollout import Status
    from rollyard.store.listing import page, runs
    from rollyard.store.values import SortKey, line_name

    for kind, word, known in (("status", status, get_args(Status)), ("column", sort, get_args(SortKey))):
        if word is not None and word not in known:
            raise UnknownName(kind, word, known)
    if not run and not (task or agent or policy or status):
        found = anyio.run(runs, store, limit, offset)
        if json:
            print_json(found)
            return
        rows = [
            [
                show_id(r.id),
                str(r.config.get("name") or "-"),
                _time(r.created_at),
                _describe_policies(r.config),
                _number(r.mean_reward),
                _states(r.attempts),
            ]
            for r in found
        ]
        if rows:
            print_table(["run", "name", "created", "agents, policies", "reward", "attempts"], rows)
            return
        if offset:
            typer.echo("no more runs")
            return
    chosen = {
        "task_id": task,
        "agent": agent,
        "policy": policy,
        "status": status,
        "sort": sort,
        "descending": descending,
    }
    shown = anyio.run(page, store, run, {**chosen, "limit": limit, "offset": offset})
    if json:
        print_json(shown)
        return
    rows = [
        [
            show_id(r.id),
            r.task_id,
            str(r.attempt),
            line_name(r),
            r.status,
            _number(r.reward),
            str(r.calls),
            f"{r.wall_s:.1f}",
        ]
        for r in shown.rows
    ]
    header = ["rollout", "task", "#", "agent", "status", "reward", "calls", "s"]
    if not run:
        header.insert(1, "run")
        for line, row in zip(rows, shown.rows, strict=True):
            line.insert(1, show_id(row.run_id) if row.run_id else "-")
    if not rows:
        chosen_none = (
            "no rollout fits" if run or any((task, agent, policy, status)) else "no run yet; `rollyard demo` makes one"
        )
        typer.echo("no more rollouts" if offset else chosen_none)
        return
    print_table(header, rows)
    if shown.next is not None:
        typer.echo(f"{shown.total} rollouts in all; for the next page add --offset {shown.next}")


def _describe_policies(config: Mapping[str, Any]) -> str:
    """Agents, and the policies that answered them: by name, or where there is only one by where it is reached."""
    from rollyard.runs.run.config import POLICY, RunConfig

    agents = ",".join(config.get("agents", RunConfig().agents))
    reached: Mapping[str, str] = config.get("policies", {})
    named = [name if name != POLICY or len(reached) > 1 else _last_part(where) for name, where in reached.items()]
    return " / ".join([agents, *([",".join(named)] if named else [])])


def _last_part(where: str) -> str:
    kind, _, rest = where.partition(":")
    return f"{kind}:{rest.rsplit('/', 1)[-1]}" if kind == "scripted" else where


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _states(attempts: Any) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(attempts.items())) or "-"
