"""`rollyard check SUBJECT`: one file per subject, `check_<subject>.py`."""

from __future__ import annotations

from rollyard.cli import check_agent, check_dataset, check_run, check_sandbox, check_tasks
from rollyard.cli.subverbs import new_group

app = new_group()


@app.callback()
def check() -> None:
    """Check an agent, a dataset, a run, a sandbox backend or tasks, and say what passed and what failed."""


app.command("agent")(check_agent.agent)
app.command("dataset")(check_dataset.dataset)
app.command("run")(check_run.run)
app.command("sandbox")(check_sandbox.sandbox)
app.command("tasks")(check_tasks.tasks)
