"""`rollyard`: the verbs, each loaded from its own file on first use.

A file `cli/<verb>.py` holds a Typer `app`. Exit codes: 0 ok, 1 rollouts failed, 2 usage, 3 infrastructure, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import textwrap
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rollyard import __version__
from rollyard.core.errors import ConfigError, Error, Interrupted

# verb -> the one line shown in `rollyard --help`
VERBS: dict[str, str] = {
    "run": "run agents on tasks, or one agent on one instruction",
    "eval": "evaluate agents x models x tasks x attempts from one TOML file",
    "compare": "compare two runs on the same tasks",
    "view": "show runs, rollouts, trajectories and tokens in a browser",
    "watch": "follow a run from another terminal",
    "rescore": "run the verifier again on stored rollouts",
    "replay": "run a rollout again with the recorded answers",
    "doctor": "show what this machine can do, with advice for what it cannot",
    "list": "list the runs of a store, or the rollouts of a run",
    "show": "show a run or a rollout: calls, events, verdict, log, diff",
    "export": "write a run as JSON Lines, training rows, Parquet, ATIF or HTML",
    "image": "add, list and remove images; build layers",
    "clean": "remove what dead sandboxes left; end live ones by label or age",
    "init": "create a task, taskset or agent from files that work",
    "check": "check an agent, a run, a sandbox backend or tasks",
    "push": "send a task folder or an aenv project to a control plane",
    "store": "back up a store while it is in use, and restore it",
    "plane": "replace the secret that a control plane signs URLs and tokens with",
    "serve": "run a server: gate, environment, browsers, model or control plane",
}

OK, ROLLOUTS_FAILED, USAGE, INFRASTRUCTURE, INTERRUPTED = 0, 1, 2, 3, 130


class Verbs(TyperGroup):
    """Commands are found by name in `VERBS`; `--help` reads the table and imports nothing."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        command = typer.main.get_command(import_module(f"rollyard.cli.{cmd_name}").app)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))
        formatter.write_paragraph()
        formatter.write_text("`rollyard VERB --help` describes a verb. Every verb takes --json.")


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"rollyard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def rollyard(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Run any CLI coding agent, in any sandbox, on any task, and keep every token."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def fit_terminal(text: str) -> str:
    """One line; on a terminal, broken between words at its width. A command or an address is never broken."""
    if not sys.stderr.isatty():
        return text
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Errors of ours become one line on stderr and the right exit code; anything else is a bug and shows its trace."""
    try:
        app(prog_name="rollyard")
    except Interrupted as error:
        typer.echo(f"rollyard: {error}", err=True)
        sys.exit(INTERRUPTED)
    except Error as error:
        typer.echo(fit_terminal(f"rollyard: {error}"), err=True)
        sys.exit(USAGE if isinstance(error, ConfigError) else INFRASTRUCTURE)
