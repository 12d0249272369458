"""`rollyard run`: a taskset, or one instruction, through agents in sandboxes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def run(
    tasks: Annotated[
        str | None, typer.Argument(help="task folder, folder of tasks, dataset, JSON Lines, or TOML file of a run")
    ] = None,
    agent: Annotated[str, typer.Option(help="agent name or .toml file; several are separated by commas")] = "pi",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="what answers model calls: scripted:FILE, upstream:URL, tokens:URL, replay:ID; NAME=... for several"
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="URL of a model server, instead of --policy upstream:URL")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model id to request from the server")] = None,
    key_env: Annotated[str | None, typer.Option(help="environment variable that holds the model server's key")] = None,
    mode: Annotated[str | None, typer.Option(help="black_box, transparent_proxy or interception_gate")] = None,
    attempts: Annotated[int, typer.Option(help="attempts at each task")] = 1,
    parallel: Annotated[int, typer.Option(help="rollouts at the same time")] = 4,
    sandbox: Annotated[str, typer.Option(help="sandbox backend")] = "local",
    store: Annotated[str, typer.Option(help="store: a path or postgresql://...")] = "runs.db",
    resume: Annotated[str | None, typer.Option(help="id of a run to finish; only missing attempts are run")] = None,
    retries: Annotated[int, typer.Option(help="retries after a failure that may be retried")] = 1,
    limit: Annotated[int | None, typer.Option(help="only the first N tasks")] = None,
    filter: Annotated[list[str] | None, typer.Option(help="only tasks whose id matches this glob")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the first attempt")] = None,
    agent_s: Annotated[float | None, typer.Option(help="time limit of the agent in seconds (limits.agent)")] = None,
    max_calls: Annotated[int | None, typer.Option(help="most model calls of one rollout")] = None,
    instruction: Annotated[
        str | None, typer.Option(help="run one rollout without a task folder: the text, or @FILE")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="with --instruction: command to run before the agent; may be repeated")
    ] = None,
    verify: Annotated[
        list[str] | None, typer.Option(help="with --instruction: command that must succeed; may be repeated")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(help="with --instruction: SRC:DST file to copy into the sandbox; may be repeated"),
    ] = None,
    allow_network: Annotated[bool, typer.Option(help="accept tasks that ask for a public network")] = False,
    allow_unsafe: Annotated[bool, typer.Option(help="accept a sandbox that isolates nothing")] = False,
    executor: Annotated[str, typer.Option(help="where rollouts run: local, or ray for a cluster")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="with --executor ray: auto, HOST:PORT or local")] = None,
    per_node: Annotated[int | None, typer.Option(help="with --executor ray: workers on each node")] = None,
    display: Annotated[str, typer.Option(help="auto, rich, plain, json or none")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Run agents on tasks and keep every call, event and verdict.

    rollyard run examples/tasks --agent pi --policy scripted:FILE --attempts 4 --store runs.db
    """
    from rollyard.runs.display.progress import display as make_display
    from rollyard.runs.run.command import RunRequest, execute, resume_command
    from rollyard.runs.run.interrupt import run_interruptibly

    fields: dict[str, Any] = {
        "tasks": tasks,
        "agents": tuple(a for a in agent.split(",") if a),
        "policies": tuple(policy or ()),
        "base_url": base_url,
        "model": model,
        "key_env": key_env,
        "mode": mode,
        "attempts": attempts,
        "parallel": parallel,
        "sandbox": sandbox,
        "store": store,
        "resume": resume,
        "retries": retries,
        "limit": limit,
        "filter": tuple(filter or ()),
        "seed": seed,
        "agent_s": agent_s,
        "max_calls": max_calls,
        "instruction": instruction,
        "setup": tuple(setup or ()),
        "verify": tuple(verify or ()),
        "files": tuple(file or ()),
        "allow_network": allow_network,
        "allow_unsafe": allow_unsafe,
        "executor": executor,
        "ray_address": ray_address,
        "per_node": per_node,
        "as_json": as_json,
    }
    request = RunRequest(**fields)
    shown = make_display("none" if as_json and display == "auto" else display)
    work = partial(execute, request, shown)
    outcome = run_interruptibly(work, display=shown, store=store, resume=resume_command(request))
    typer.echo(outcome.text, nl=False)
    if outcome.stopped:
        raise typer.Exit(INFRASTRUCTURE)
    if outcome.failed:
        raise typer.Exit(ROLLOUTS_FAILED)
