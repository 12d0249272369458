"""`rollyard clean`: remove what sandboxes left behind; end those that are named."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def clean(
    backend: Annotated[str, typer.Option("--backend", help="whose sandboxes")] = "local",
    label: Annotated[list[str] | None, typer.Option("--label", help="end live ones with this NAME=VALUE too")] = None,
    run: Annotated[str | None, typer.Option("--run", help="end live ones of this run too")] = None,
    older_than: Annotated[float | None, typer.Option("--older-than", help="end live ones older than SECONDS")] = None,
    every: Annotated[bool, typer.Option("--all", help="end all live ones of this user")] = False,
    json: Annotated[bool, typer.Option("--json", help="the ids as JSON")] = False,
) -> None:
    """Without options only what dead sandboxes left is removed: processes, cgroups, directories. Nothing alive is touched."""
    from rollyard.cli.printing import print_json
    from rollyard.core.errors import ConfigError
    from rollyard.sandbox import backend as make

    pairs = [part.partition("=") for part in label or []]
    if any(not sign for _, sign, _ in pairs):
        raise ConfigError("a label is NAME=VALUE", hint="for example --label run=run_01k9")
    if run is not None:
        pairs.append(("rollyard.run", "=", run))
    labels = {name: value for name, _, value in pairs} if pairs or every else None

    async def reap() -> list[str]:
        async with make(backend) as opened:
            return await opened.reap(labels, older_than)

    gone = anyio.run(reap)
    if json:
        print_json({"removed": gone})
    else:
        typer.echo("\n".join(gone) if gone else "nothing to remove")
