"""`rollyard demo`: an agent solves a small task, as it happens, and where to look afterwards."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.main import INFRASTRUCTURE, ROLLOUTS_FAILED
from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def demo(
    agent: Annotated[
        str, typer.Option(help="agent; shell-agent needs no installation, pi, codex, claude-code are installed once")
    ] = "shell-agent",
    base_url: Annotated[
        str | None, typer.Option(help="model server that answers; without it a script does, and no model is needed")
    ] = None,
    model: Annotated[str | None, typer.Option(help="with --base-url: the model's name there")] = None,
    key_env: Annotated[str | None, typer.Option(help="with --base-url: variable that holds its key")] = None,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
) -> None:
    """Watch an agent solve a small task in a sandbox. A script answers its model calls, or a server of yours (--base-url).

    rollyard demo
    """
    from rollyard.cli.printing import print_json, print_text
    from rollyard.core.errors import ConfigError
    from rollyard.runs.demo import run_demo
    from rollyard.runs.display.progress import summary

    if base_url is None and (model or key_env):
        raise ConfigError("--model and --key-env are of a model server", hint="name it with --base-url URL")
    done = anyio.run(run_demo, agent, base_url, model, key_env, store, _say_nothing if json else print_text)
    if json:
        print_json(summary(done))
    if done.status == "infra_error":
        raise typer.Exit(INFRASTRUCTURE)
    if base_url is None and done.reward != 1.0:
        raise typer.Exit(ROLLOUTS_FAILED)


def _say_nothing(line: str) -> None:
    """For a program, which reads the outcome alone."""
