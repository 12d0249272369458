"""How verbs print: a table for people, JSON for programs. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import typer


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is not padded."""
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        typer.echo("  ".join([*cells, row[-1]]).rstrip())
