"""`rollyard run`: a taskset, or one instruction, through agents in sandboxes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED
from rollyard.cli.options import with_rollout_options
from rollyard.cli.shared_options import StoreOption, fill
from rollyard.cli.verb_app import new_verb
from rollyard.core.agent import DEFAULT_AGENT
from rollyard.core.home import STORE
from rollyard.core.limits import Limits
from rollyard.runs.rollout.options import RolloutFields

app = new_verb()


@app.command()
@with_rollout_options
def run(
    options: RolloutFields,
    tasks: Annotated[
        str | None, typer.Argument(help="task folder, folder of tasks, dataset, JSON Lines, or TOML file of a run")
    ] = None,
    agent: Annotated[
        str, typer.Option(help="agent name or .toml file; several are separated by commas")
    ] = DEFAULT_AGENT,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="what answers model calls: scripted:FILE, upstream:URL, tokens:URL, replay:ID; NAME=... for several"
        ),
    ] = None,
    attempts: Annotated[int, typer.Option(help="attempts at each task")] = 1,
    parallel: Annotated[
        str, typer.Option(help="rollouts at the same time; auto: as many as this machine's memory carries")
    ] = "4",
    sandbox: Annotated[str, typer.Option(help="sandbox backend")] = "local",
    store: StoreOption = STORE,
    name: Annotated[str, typer.Option(help="name of the run, by which other verbs find it")] = "",
    resume: Annotated[
        str | None, typer.Option(help="run to finish, by id, name or `last`; only missing attempts are run")
    ] = None,
    retries: Annotated[int, typer.Option(help="retries after a failure that may be retried")] = 1,
    limit: Annotated[int | None, typer.Option(help="only the first N tasks")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="a task that cannot be read is an error, not left out")
    ] = False,
    filter: Annotated[list[str] | None, typer.Option(help="only tasks whose id matches this glob")] = None,
    agent_s: Annotated[float | None, typer.Option(help="time limit of the agent in seconds (limits.agent)")] = None,
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
    workers: Annotated[
        int | None, typer.Option(help="processes of this machine that share the work; without it, this one does all")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="let each rollout branch: width=4,depth=2,at=3 (children, levels, calls that a level keeps)"),
    ] = None,
    executor: Annotated[str, typer.Option(help="where rollouts run: local, or ray for a cluster")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="with --executor ray: auto, HOST:PORT or local")] = None,
    per_node: Annotated[int | None, typer.Option(help="with --executor ray: workers on each node")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="with --executor ray: nodes for rollouts to ask Ray's autoscaler for")
    ] = None,
    display: Annotated[str, typer.Option(help="auto, rich, plain, json or none")] = "auto",
    log_to: Annotated[
        list[str] | None,
        typer.Option(help="log rewards and tokens as they come: wandb, mlflow, tensorboard; KIND:WHERE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Run agents on tasks and keep every call, event and verdict.

    rollyard run examples/tasks --agent pi --policy scripted:FILE --attempts 4 --store runs.db
    """
    from rollyard.runs.display.loggers import with_loggers
    from rollyard.runs.display.progress import display as make_display
    from rollyard.runs.run.command import RunRequest, execute, read_parallel, resume_command
    from rollyard.runs.run.interrupt import run_interruptibly

    if log_to and instruction is not None:
        raise typer.BadParameter("it logs runs of tasks; one instruction is one rollout", param_hint="--log-to")
    if agent_s is not None:
        options["limits"] = replace(options.get("limits") or Limits(), agent=agent_s)
    request = fill(
        RunRequest,
        locals(),
        agents=tuple(name for name in agent.split(",") if name),
        policies=tuple(policy or ()),
        files=tuple(file or ()),
        parallel=read_parallel(parallel),
    )
    shown = with_loggers(make_display("none" if as_json and display == "auto" else display), log_to or ())
    work = partial(execute, request, shown)
    outcome = run_interruptibly(work, display=shown, store=store, resume=resume_command(request))
    typer.echo(outcome.text, nl=False)
    if outcome.stopped:
        raise typer.Exit(INFRASTRUCTURE)
    if outcome.failed:
        raise typer.Exit(ROLLOUTS_FAILED)
