"""What several verbs have: `--store`, `--port`, `--allow-host`, and the options of a verb as one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from rollyard.core.home import STORE_VARIABLE

T = TypeVar("T", bound=msgspec.Struct)

_HELP = "store: a path or postgresql://..."
StoreOption = Annotated[str, typer.Option("--store", help=_HELP, envvar=STORE_VARIABLE)]
StoreArgument = Annotated[str, typer.Argument(help=_HELP, envvar=STORE_VARIABLE)]


def _port(value: int) -> int:
    if not 0 <= value <= 65535:
        raise typer.BadParameter(f"{value} is not a port (0 to 65535)")
    return value


Port = Annotated[int, typer.Option(help="port to listen on; 0 picks a free one", callback=_port)]
AllowHosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="another name that clients ask for this server by; may be repeated"),
]


def fill(kind: type[T], given: Mapping[str, Any], **more: Any) -> T:
    """A struct out of a verb's parameters of the same names; one that was not given keeps the struct's default. `more` are
    fields whose parameters have another name or form."""
    named = {name: given[name] for name in kind.__struct_fields__ if given.get(name) is not None}
    return kind(**{name: tuple(one) if isinstance(one, list) else one for name, one in named.items()} | more)
