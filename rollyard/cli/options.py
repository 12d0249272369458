"""Options of rollouts that several verbs have, each described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rollyard.runs.rollout.options import OPTIONS, Kind, read_options

_TYPES: dict[Kind, Any] = {"flag": bool | None, "number": int | None, "text": str | None, "lines": list[str] | None}

PullFrom = Annotated[list[str] | None, typer.Option("--pull", help=OPTIONS["pull"].help)]


def with_rollout_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each of a rollout's; its parameter `options` gets those that were given."""

    def call(**values: Any) -> None:
        texts = {name: values.pop(name) for name in OPTIONS}
        command(**values, options=read_options(texts))

    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "options"]
    derived = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_TYPES[option.kind], _describe(option)],
        )
        for option in OPTIONS.values()
    ]
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    call.__signature__ = inspect.Signature([*own, *derived])  # pyright: ignore[reportFunctionMemberAccess] - read by typer
    call.__annotations__ = {one.name: one.annotation for one in (*own, *derived)}
    return call


def _describe(option: Any) -> Any:
    flags = () if option.kind == "flag" else (option.flag,)  # typer adds --no-... to a flag that it names itself
    return typer.Option(*flags, help=option.help, rich_help_panel="Options of each rollout")
