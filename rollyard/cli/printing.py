"""How verbs print: a table for people, JSON for programs. Nothing here decides anything."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec
import typer

_NARROWEST = 5  # columns are not cut below this
_PROSE = 24  # a last column is not folded below this


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell. On a terminal a line fits: the last column goes on below itself, and where that
    is not enough the widest others are cut; never the first, which is a name to be copied."""
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    if sys.stdout.isatty():
        room = os.get_terminal_size(sys.stdout.fileno()).columns - 2 * (len(widths) - 1)
        last = min(widths[-1], _PROSE)
        while sum(widths[:-1]) + last > room and max(widths[1:-1], default=0) > _NARROWEST:
            widths[widths.index(max(widths[1:-1]), 1)] -= 1
        widths[-1] = max(last, room - sum(widths[:-1]))
    for row in (header, *rows):
        cells = [cut(cell, width).ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        for line in fold(row[-1], widths[-1]):
            typer.echo("  ".join([*cells, line]).rstrip())
            cells = [" " * width for width in widths[:-1]]


def fold(text: str, width: int) -> list[str]:
    """Between words; a command or a path stays whole."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
