"""docs/cli.md is what `--help` says. `python tests/cli/test_reference.py` writes it again."""

import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from rollyard.cli.main import VERBS, app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
HEAD = """# Command line

Made from `rollyard --help` and `rollyard VERB --help`; do not edit. `python tests/cli/test_reference.py` writes this page
again, and a test fails when it is stale.

Every verb takes `--json`. Exit codes: 0 success, 1 rollouts failed, 2 wrong usage, 3 infrastructure (a store, a server, a
port in use), 130 Ctrl-C, 143 SIGTERM. [quickstart.md](quickstart.md) shows the verbs in use, [glossary.md](glossary.md)
explains the words.
"""


def help_of(words: list[str]) -> str:
    done = CliRunner().invoke(
        app, [*words, "--help"], prog_name="rollyard", env={"COLUMNS": "120", "ROLLYARD_STORE": ""}
    )
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


def commands() -> list[list[str]]:
    """Every verb, and below it the verbs that it groups."""
    found: list[list[str]] = []
    root = typer.main.get_command(app)
    for verb in VERBS:
        command = root.get_command(None, verb)
        below = getattr(command, "commands", {})
        found.append([verb])
        found.extend([verb, name] for name in below)
    return found


def render() -> str:
    parts = [HEAD, f"```\n{help_of([])}\n```\n"]
    for words in commands():
        level = "##" if len(words) == 1 else "###"
        parts.append(f"{level} {' '.join(words)}\n\n```\n{help_of(words)}\n```\n")
    return "\n".join(parts)


def test_the_page_is_what_help_says():
    assert PAGE.read_text() == render(), "docs/cli.md is stale: run `python tests/cli/test_reference.py`"


def test_help_has_no_python_in_it():
    assert "--attempts N" in PAGE.read_text() and "Example:\n" in PAGE.read_text()
    assert re.findall(r"<\w+>|<list\[|\{\w+\}$", PAGE.read_text(), re.M) == []


if __name__ == "__main__":
    PAGE.write_text(render())
