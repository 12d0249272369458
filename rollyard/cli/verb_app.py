"""The typer app of a verb, with help in a shell's words: `TEXT` and not `<str>`, the options of rollouts in a section of their
own, examples marked as such, and of each verb below it all of its first sentence. What typer says of a wrong value is said in
these words too."""

from __future__ import annotations

import math
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WORDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH", "file": "PATH"}
_NUMBERS = {"int": "no whole number", "float": "no number"}
_LARGEST = 2**63 - 1  # that a store's columns and limits hold


class Verb(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            left = super().parse_args(ctx, args)
            for param in self.get_params(ctx):
                _check_number(ctx, param)
        except typer.BadParameter as error:
            error.message = _reword(error.message)
            param = error.param
            if param is not None and param.name is not None and param.param_type_name == "argument":
                error.param_hint = f"'{param.name.upper()}'"
            raise
        return left

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        _write_usage(self, ctx, formatter)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """A paragraph that is a command is an example."""
        paragraphs = [" ".join(one.split()) for one in (self.help or "").split("\n\n")]
        examples = [one for one in paragraphs if one.startswith("rollyard ")]
        for one in paragraphs:
            if one and one not in examples:
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(one)
        if examples:
            with formatter.section("Example"):
                formatter.write_text("\n\n".join(examples))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class Subverbs(TyperGroup):
    def format_usage(self, ctx: Any, formatter: Any) -> None:
        _write_usage(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command)) for name, command in found if command is not None])


class VerbApp(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=Verb, **options)


def new_verb() -> VerbApp:
    return VerbApp(rich_markup_mode=None, add_completion=False)


def new_group() -> VerbApp:
    return VerbApp(cls=Subverbs, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


def _write_usage(command: Any, ctx: Any, formatter: Any) -> None:
    pieces = [_show_argument(piece) for piece in command.collect_usage_pieces(ctx)]
    formatter.write_usage(ctx.command_path, " ".join(pieces))


def _show_argument(piece: str) -> str:
    """`{config}` and `[tasks]` are `CONFIG` and `[TASKS]`."""
    return re.sub(r"^\{(\w+)\}|^\[([a-z]\w*)\]", lambda found: (found[1] or f"[{found[2]}]").upper(), piece)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if (row := param.get_help_record(ctx)) is None:
            continue
        name, text = row
        if param.param_type_name == "argument":
            sections.setdefault("Arguments", []).append((name.split()[0].upper(), text))
        else:
            title = getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(title, []).append((_show_value(name), text))
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows)


def _show_value(name: str) -> str:
    return re.sub(r"<(?:list\[)?(\w+)(?: range)?\]?>", lambda found: _WORDS.get(found[1].lower(), found[0]), name)


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split()).split(". ")[0].removesuffix(".")


def _check_number(ctx: Any, param: Any) -> None:
    """A number that no limit or page can be is refused here, for every verb."""
    value = ctx.params.get(param.name)
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"'{value}' is {_NUMBERS['float']}", ctx, param)
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise typer.BadParameter(f"{value} is too large", ctx, param)


def _reword(said: str) -> str:
    said = re.sub(r"is not a valid (int|float)(?: range)?\.$", lambda found: f"is {_NUMBERS[found[1]]}", said)
    said = re.sub(r"^(\S+?)(?:\.0)? is not in the range x>=(\S+)\.$", r"must be at least \2, got \1", said)
    return re.sub(r"^(\S+) is not in the range (\S+)<=x<=(\S+)\.$", r"must be between \2 and \3, got \1", said)
