"""`rollyard`: the verbs, each loaded from its own file on first use.

A file `cli/<verb>.py`, with `_` for `-`, holds a Typer `app`.
Exit codes: 0 ok, 1 rollouts failed, 2 usage, 3 infrastructure, 130 Ctrl-C (143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from rollyard import __version__
from rollyard.core.errors import ConfigError, Error, Interrupted, UnknownName

# what people come for -> verb -> the one line shown in `rollyard --help`
GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "demo": "watch an agent solve a small task; needs no model and no repository",
        "init": "create a task, taskset, agent, script, evaluation or verifier that works as it is",
        "doctor": "show what this machine can do, with advice for what it cannot",
    },
    "Run": {
        "run": "run agents on tasks, or one agent on one instruction",
        "eval": "evaluate agents x models x tasks x attempts from one TOML file",
        "replay": "run a rollout again with the recorded answers",
        "branch": "branch a rollout at one of its calls, with other answers",
        "continue": "continue a rollout that was cut off or ran out of its budget",
        "rescore": "run the verifier again on stored rollouts",
    },
    "Inspect": {
        "view": "show runs, rollouts, trajectories and tokens in a browser",
        "watch": "follow a run from another terminal",
        "list": "list runs, or the rollouts of a run",
        "show": "show a run or a rollout: calls, events, verdict, log, diff",
        "why": "say why a rollout failed, with the evidence and what to do",
        "note": "add notes, labels and scores of your own to a rollout",
        "grep": "search transcripts, tool calls, logs and verdicts for a text",
        "scan": "look for rewards that cannot be trusted: tests touched, answers read, loops, refusals",
        "compare": "compare two runs on the same tasks",
        "export": "write a run as JSON Lines, training rows, Parquet, ATIF, an Inspect log, a Harbor job or HTML",
        "import": "import an Inspect log, an ATIF document or a Harbor job as a run",
    },
    "Maintain": {
        "check": "check an agent, a dataset, a run, a sandbox backend or tasks",
        "datasets": "add datasets by name, list, show and run them",
        "make-tasks": "make tasks from a Python package: faults that its own tests find",
        "image": "add, pull, list and remove images; build layers",
        "store": "back up, restore, copy and prune a store",
        "clean": "remove what dead sandboxes left; end live ones by label or age",
    },
    "Serve": {
        "serve": "run a server: gate, environment, browsers, model, rollouts or control plane",
        "push": "send a task folder, an aenv project or an OpenEnv package to a control plane",
        "plane": "manage a control plane's keys, owners, quotas, instances and secrets",
    },
}
VERBS: dict[str, str] = {verb: line for group in GROUPS.values() for verb, line in group.items()}

OK, ROLLOUTS_FAILED, USAGE, INFRASTRUCTURE = 0, 1, 2, 3
SIGNALLED = 128  # and the signal's number, as shells say it
# What the machine refuses, which is no bug of ours: the message is one line that names the file.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_REFUSED = _DISK | {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ELOOP,
}  # fmt: skip
_WRONG_USAGE: Any = typer.BadParameter.__mro__[2]  # the root of what typer says of options; it has no public name


class Verbs(TyperGroup):
    """Commands are found by name in `VERBS`; `--help` reads the table and imports nothing."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise UnknownName("verb", cmd_name, list(VERBS), hint="`rollyard --help` describes them")
        command = typer.main.get_command(import_module(f"rollyard.cli.{cmd_name.replace('-', '_')}").app)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        widest = max(map(len, VERBS))
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(verb.ljust(widest), line) for verb, line in verbs.items()])
        formatter.write_paragraph()
        formatter.write_text(
            "`rollyard VERB --help` describes a verb. Every verb takes --json. "
            "`rollyard --install-completion` completes verbs and options in your shell."
        )


app = typer.Typer(
    cls=Verbs,
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


def _print_error(kind: str, message: str, hint: str | None = None) -> None:
    print(json.dumps({"error": kind, "message": message, "hint": hint}))


def _call_for_a_program() -> None:
    """With `--json` also what typer says of wrong options is an object on stdout."""
    try:
        code = app(prog_name="rollyard", standalone_mode=False)
    except _WRONG_USAGE as error:
        _print_error("ConfigError", error.format_message())
        sys.exit(USAGE)
    sys.exit(code if isinstance(code, int) else OK)


def _call() -> None:
    """What was printed is out before the command ends, so that what cannot be written is said."""
    try:
        if "--json" in sys.argv[1:]:
            _call_for_a_program()
        app(prog_name="rollyard")
    finally:
        sys.stdout.flush()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _in_a_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _open_closed_streams() -> None:
    """A stream that the caller closed is /dev/null, so that no file that is opened later gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - they last as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


class _RetryLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        cause = re.sub(r"""^\w+\(['"](.*)['"]\)$""", r"\1", record.__dict__["stamina.caused_by"])
        return f"rollyard: {cause}; trying again"


def _log_retries() -> None:
    """What is tried again is one line on stderr with its cause."""
    shown = logging.StreamHandler()
    shown.setFormatter(_RetryLine())
    retries = logging.getLogger("stamina")
    retries.addHandler(shown)
    retries.propagate = False


def _explain(error: OSError) -> Error:
    """A file is named; output that cannot be written has no name, and is not tried again when the process ends."""
    if error.filename is not None:
        return Error(f"cannot use {os.fsdecode(error.filename)}: {error.strerror}")
    if error.errno not in _DISK:
        return Error(f"the machine refused: {error.strerror}")
    _drop_output()
    return Error(f"cannot write the output: {error.strerror}")


def _fail(error: Error, code: int) -> NoReturn:
    if "--json" in sys.argv[1:]:
        _print_error(type(error).__name__, error.message, error.hint)
    else:
        from rollyard.runs.display.paint import RED, paint

        message = fit_terminal(f"rollyard: {error}")
        typer.echo(message.replace("rollyard:", paint("rollyard:", RED, sys.stderr), 1), err=True)
    sys.exit(code)


def main() -> None:
    """Errors of ours, and what the machine refuses, become one line on stderr (with `--json` an object on stdout) and the right
    exit code; anything else is a bug and shows its trace."""
    _open_closed_streams()
    _log_retries()
    try:
        _call()
    except Interrupted as error:
        typer.echo(f"rollyard: {error}", err=True)
        sys.exit(SIGNALLED + error.signal_number)
    except Error as error:
        _fail(error, USAGE if isinstance(error, ConfigError) else INFRASTRUCTURE)
    except BrokenPipeError:  # a program such as `head` has read enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _in_a_folder():
            _fail(Error("the current folder was removed", hint="cd to another"), INFRASTRUCTURE)
        if error.errno not in _REFUSED:
            raise
        _fail(_explain(error), INFRASTRUCTURE)
