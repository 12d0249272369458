"""`rollyard plane`: what the operator of a control plane does beside its servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="keep a control plane's secrets", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def plane() -> None:
    """Keep a control plane's secrets."""


@app.command("rotate-secret")
def rotate_secret(
    signing_file: Annotated[
        Path | None, typer.Option(help="file of `serve plane --signing-file`; the default one without it")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Replace the secret that signs a control plane's URLs and tokens. Those from before end when its servers restart."""
    from rollyard.cli.printing import print_json
    from rollyard.plane.service import signing

    written = signing.rotate_secret(signing_file)
    if json:
        print_json({"signing_file": str(written)})
    else:
        typer.echo(f"{written} holds a new secret; restart `rollyard serve plane` to end what was signed before")
