"""A verb with verbs of its own, whose help says of each all of its first sentence."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class Subverbs(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command)) for name, command in found if command is not None])


def new_group() -> typer.Typer:
    return typer.Typer(cls=Subverbs, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
