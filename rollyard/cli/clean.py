"""`rollyard clean`: remove what dead sandboxes left; end live ones that are named."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def clean(
    backend: Annotated[str, typer.Option("--backend", help="sandbox backend to clean")] = "local",
    label: Annotated[
        list[str] | None, typer.Option("--label", help="also end live sandboxes with this NAME=VALUE label")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="also end live sandboxes of this run")] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", help="also end live sandboxes older than SECONDS", min=0)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="end all live sandboxes of this user")] = False,
    baked: Annotated[
        bool, typer.Option("--baked", help="delete the images that were built for tasks, and those baked at a provider")
    ] = False,
    snapshots: Annotated[
        str | None,
        typer.Option("--snapshots", help="remove the snapshots that this run or rollout kept (--snapshot-every)"),
    ] = None,
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print the removed ids as JSON")] = False,
) -> None:
    """Remove what dead sandboxes left: processes, cgroups, directories. Live sandboxes are ended only if an option names them."""
    from rollyard.cli.printing import print_json
    from rollyard.core.errors import ConfigError
    from rollyard.core.protocols import KeepsBuilds
    from rollyard.runs.snapshots import clean_snapshots
    from rollyard.sandbox import backend as make

    if baked and (label or run or older_than is not None or every):
        raise ConfigError("--baked is about images, and the other options are about sandboxes", hint="give one of them")
    if snapshots is not None and (baked or label or run or older_than is not None or every):
        raise ConfigError(
            "--snapshots is about what rollouts kept, and the other options are not", hint="give it alone"
        )
    pairs = [part.partition("=") for part in label or []]
    if any(not sign for _, sign, _ in pairs):
        raise ConfigError("a label is NAME=VALUE", hint="for example --label run=run_01k9")
    if run is not None:
        pairs.append(("rollyard.run", "=", run))
    labels = {name: value for name, _, value in pairs} if pairs or every else None

    async def reap() -> list[str]:
        async with make(backend) as opened:
            if snapshots is not None:
                return await clean_snapshots(store, snapshots, opened)
            if not baked:
                return await opened.reap(labels, older_than)
            if not isinstance(opened, KeepsBuilds):
                raise ConfigError(
                    f"the {backend} backend keeps no images of its own", hint="its images are those of its engine"
                )
            return await opened.remove_baked()

    gone = anyio.run(reap)
    if json:
        print_json({"removed": gone})
    else:
        typer.echo("\n".join(gone) if gone else "nothing to remove")
