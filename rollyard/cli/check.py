"""`rollyard check SUBJECT`: hold a part against its list. Each subject has its own file, `check_<subject>.py`."""

from __future__ import annotations

import typer

from rollyard.cli import check_agent, check_run, check_sandbox, check_tasks

app = typer.Typer(
    help="hold a part against its list", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


@app.callback()
def check() -> None:
    """Hold a part against what is expected of it."""


app.command("agent")(check_agent.agent)
app.command("run")(check_run.run)
app.command("sandbox")(check_sandbox.sandbox)
app.command("tasks")(check_tasks.tasks)
