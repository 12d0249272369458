"""How verbs print: a table for people, JSON for programs. Nothing here decides anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import typer

_NARROWEST = 5  # columns are not cut below this


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is not padded. On a terminal, the widest columns are cut until a line
    fits: never the first, which is a name to be copied."""
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    if sys.stdout.isatty():
        room = os.get_terminal_size(sys.stdout.fileno()).columns - 2 * (len(widths) - 1)
        while sum(widths) > room and max(widths[1:], default=0) > _NARROWEST:
            widths[widths.index(max(widths[1:]), 1)] -= 1
    for row in (header, *rows):
        cells = [cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
