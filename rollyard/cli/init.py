"""`rollyard init task|taskset|agent|script|eval|verifier PATH`: first files of something new, which work as they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli.verb_app import new_group

app = new_group()

Where = Annotated[Path, typer.Argument(help="path to create; its last part is the name")]
Json = Annotated[bool, typer.Option("--json", help="print what was made as JSON")]


@app.callback()
def init() -> None:
    """Create a task, taskset, agent, script, evaluation or verifier that works as it is."""


@app.command()
def task(
    path: Where,
    kind: Annotated[str, typer.Option(help="tests (a test.sh), pytest or steps")] = "tests",
    json: Json = False,
) -> None:
    """Create a task folder that `rollyard check tasks` accepts."""
    from rollyard.core.errors import UnknownName
    from rollyard.tasks.scaffold import new_task

    if kind not in ("tests", "pytest", "steps"):
        raise UnknownName("kind of task", kind, ["tests", "pytest", "steps"])
    _say(new_task(path, kind), f"rollyard check tasks {_quote(path)}", json)


@app.command()
def taskset(path: Where, json: Json = False) -> None:
    """Create a Python file with tasks and a verifier."""
    from rollyard.tasks.scaffold import new_taskset

    made = new_taskset(path)
    _say(made, f"rollyard check tasks {_quote(made)}", json)


@app.command()
def agent(path: Where, json: Json = False) -> None:
    """Create an agent description in TOML."""
    from rollyard.tasks.scaffold import new_agent

    made = new_agent(path)
    _say(made, f"rollyard run --instruction 'Say hello.' --agent {_quote(made)} --policy upstream:URL", json)


@app.command()
def script(path: Where, json: Json = False) -> None:
    """Create the answers of a scripted policy."""
    from rollyard.tasks.scaffold import new_script

    made = new_script(path)
    _say(made, f"rollyard run TASKS --agent shell-agent --policy {shlex.quote(f'scripted:{made}')}", json)


@app.command("eval")
def evaluation(path: Where, json: Json = False) -> None:
    """Create a folder with an evaluation: eval.toml, a task and a script."""
    from rollyard.tasks.scaffold import new_eval

    made = new_eval(path)
    _say(made, f"rollyard eval {_quote(made)} --out report", json)


@app.command()
def verifier(path: Where, json: Json = False) -> None:
    """Create a Python file with a verifier."""
    from rollyard.tasks.scaffold import new_verifier

    made = new_verifier(path)
    _say(made, "name it in a task's task.toml, as the file says, then\n  rollyard check tasks FOLDER", json)


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _say(made: Path, following: str, json: bool) -> None:
    from rollyard.cli.printing import print_json

    if json:
        print_json({"made": str(made), "next": following})
    else:
        typer.echo(f"made {made}\nnext: {following}")
