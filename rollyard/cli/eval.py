"""`rollyard eval`: agents x models x tasks x attempts from one TOML file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED
from rollyard.cli.options import with_rollout_options
from rollyard.cli.printing import print_json
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE
from rollyard.runs.rollout.options import RolloutFields, write_options

app = new_verb()


@app.command()
@with_rollout_options
def evaluate(
    options: RolloutFields,
    config: Annotated[
        str, typer.Argument(help="TOML file: tasks, agents, [policies], attempts, [prices.NAME], max_cost")
    ],
    store: StoreOption = STORE,
    resume: Annotated[str | None, typer.Option(help="id of a run to finish; only missing attempts are run")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for report.json, report.html and plots")] = None,
    display: Annotated[str, typer.Option(help="auto, rich, plain, json or none")] = "auto",
    log_to: Annotated[
        list[str] | None,
        typer.Option(help="log rewards and tokens as they come: wandb, mlflow, tensorboard; KIND:WHERE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Evaluate agents and models on tasks, several attempts each, and report with confidence intervals.

    Options given here override those of the file.
    """
    from rollyard.runs.display.loggers import with_loggers
    from rollyard.runs.display.progress import display as make_display
    from rollyard.runs.report.report import Report
    from rollyard.runs.run import evaluate as evaluation
    from rollyard.runs.run.command import describe_end, store_option
    from rollyard.runs.run.config import load
    from rollyard.runs.run.interrupt import run_interruptibly
    from rollyard.runs.run.policies import check_policies
    from rollyard.store import Store

    shown = with_loggers(make_display("none" if as_json and display == "auto" else display), log_to or ())

    written: list[Path] = []

    async def work() -> Report:
        async with Store.open(store, create=resume is None) as kept:
            loaded = load(config, options)
            check_policies(loaded)
            with shown:
                report = await evaluation.evaluate(loaded, store=kept, display=shown, resume=resume)
            if out is not None:
                from rollyard.page.export import run_page
                from rollyard.runs.report.plots import write_report

                _, html = await run_page(kept, report.run_id)
                written.extend(await write_report(kept, report, out, html=html))
            return report

    words = shlex.join(["rollyard", "eval", config, *write_options(options)])
    again = f"{words} --resume {{run}}{store_option(store)}"
    report = run_interruptibly(work, display=shown, store=store, resume=again)
    if as_json:
        print_json(report)
    else:
        typer.echo(describe_end(report, store), nl=False)
        if out is not None:
            typer.echo(f"report in {out / 'report.html'}")
        if written and not any(path.suffix == ".svg" for path in written):
            typer.echo("without plots, which need `pip install 'rollyard[report]'`")
    if report.stopped:
        raise typer.Exit(INFRASTRUCTURE)
    if any(status != "completed" for status in report.statuses):
        raise typer.Exit(ROLLOUTS_FAILED)
