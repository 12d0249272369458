"""`rollyard check SUBJECT`: one file per subject, `check_<subject>.py`."""

from __future__ import annotations

import typer

from rollyard.cli import check_agent, check_dataset, check_run, check_sandbox, check_tasks

app = typer.Typer(
    help="check an agent, a dataset, a run, a sandbox backend or tasks",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def check() -> None:
    """Check an agent, a dataset, a run, a sandbox backend or tasks, and say what passed and what failed."""


app.command("agent")(check_agent.agent)
app.command("dataset")(check_dataset.dataset)
app.command("run")(check_run.run)
app.command("sandbox")(check_sandbox.sandbox)
app.command("tasks")(check_tasks.tasks)
