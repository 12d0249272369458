"""`--store`, which most verbs have: what it says, or `ROLLYARD_STORE`, or runs.db in this folder."""

from __future__ import annotations

from typing import Annotated

import typer

from rollyard.core.home import STORE_VARIABLE

_HELP = "store: a path or postgresql://..."
StoreOption = Annotated[str, typer.Option("--store", help=_HELP, envvar=STORE_VARIABLE)]
StoreArgument = Annotated[str, typer.Argument(help=_HELP, envvar=STORE_VARIABLE)]
