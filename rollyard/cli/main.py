"""`rollyard`: the verbs, each loaded from its own file on first use.

A file `cli/<verb>.py` holds a Typer `app`. Exit codes: 0 ok, 1 rollouts failed, 2 usage, 3 infrastructure.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click
import typer

from rollyard.core.errors import ConfigError, Error

# verb -> the one line shown in `rollyard --help`
VERBS: dict[str, str] = {
    "doctor": "show what this machine can do, and what to do about what it cannot",
}

OK, ROLLOUTS_FAILED, USAGE, INFRASTRUCTURE = 0, 1, 2, 3


class Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = typer.main.get_command(import_module(f"rollyard.cli.{cmd_name}").app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], list(VERBS), n=1)
            if near:
                error.message += f" Did you mean {near[0]!r}?"
            raise


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="rollyard")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Run any CLI coding agent, in any sandbox, on any task, and keep every token."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: list[str] | None = None) -> Any:
    """Errors of ours become one line on stderr and the right exit code; anything else is a bug and shows its trace."""
    try:
        result = app.main(args=args, prog_name="rollyard", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE)
    except ConfigError as error:
        click.echo(f"rollyard: {error}", err=True)
        sys.exit(USAGE)
    except Error as error:
        click.echo(f"rollyard: {error}", err=True)
        sys.exit(INFRASTRUCTURE)
    sys.exit(result if isinstance(result, int) else OK)
