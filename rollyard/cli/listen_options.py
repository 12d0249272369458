"""Options of verbs that listen on a port."""

from __future__ import annotations

from typing import Annotated

import typer


def _port(value: int) -> int:
    if not 0 <= value <= 65535:
        raise typer.BadParameter(f"{value} is not a port (0 to 65535)")
    return value


Port = Annotated[int, typer.Option(help="port to listen on; 0 picks a free one", callback=_port)]

AllowHosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="another name that clients ask for this server by; may be repeated"),
]
