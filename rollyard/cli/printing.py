"""How verbs print: a table for people, JSON for programs. Nothing here decides anything."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec
import typer

from rollyard.core.ids import short_id
from rollyard.runs.display.paint import BOLD, GREEN, RED, paint

_NARROWEST = 5  # columns are not cut below this
_PROSE = 24  # a last column is not folded below this
_LABEL = re.compile(r" *(?:\S{1,10}(?: \S{1,3})?  +)?")  # of a line: its margin, and words that stand apart
_COLOURS = {"completed": GREEN, "ok": GREEN, "agent_error": RED, "infra_error": RED, "timeout": RED}


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_text(text: str) -> None:
    """Prose. On a terminal a line that is too long goes on between words, below where its text began: behind the margin and a
    label such as `cause   `."""
    for line in text.split("\n"):
        if not sys.stdout.isatty():
            typer.echo(line)
            continue
        label = (_LABEL.match(line) or [""])[0]
        first, *rest = fold(line[len(label) :], terminal_columns() - len(label)) or [""]
        typer.echo("\n".join([label + first, *(" " * len(label) + part for part in rest)]))


def show_id(id: str) -> str:
    """Short for a person, whole for a program."""
    return short_id(id) if sys.stdout.isatty() else id


def terminal_columns() -> int:
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell. On a terminal a line fits: the last column goes on below itself, and where that
    is not enough the widest others are cut; never the first, which is a name to be copied."""
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    if sys.stdout.isatty():
        room = terminal_columns() - 2 * (len(widths) - 1)
        last = min(widths[-1], _PROSE)
        while sum(widths[:-1]) + last > room and max(widths[1:-1], default=0) > _NARROWEST:
            widths[widths.index(max(widths[1:-1]), 1)] -= 1
        widths[-1] = max(last, room - sum(widths[:-1]))
    for at, row in enumerate((header, *rows)):
        cells = [shorten(cell, width).ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        if at:
            cells = [paint(cell, _COLOURS.get(cell.strip())) for cell in cells]
        for line in fold(row[-1], widths[-1]):
            typer.echo(paint("  ".join([*cells, line]).rstrip(), None if at else BOLD))
            cells = [" " * width for width in widths[:-1]]


def fold(text: str, width: int) -> list[str]:
    """Between words; a path stays whole, and a `command`, which is to be copied."""
    if len(text) <= width:
        return [text]
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    return [
        line.replace("\0", " ") for line in textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    ]


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
