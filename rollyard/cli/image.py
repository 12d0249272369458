"""`rollyard image add|list|rm|layer`: the images and layers that sandboxes open from."""

from __future__ import annotations

import time
from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json, print_table
from rollyard.cli.subverbs import new_group

app = new_group()
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def image() -> None:
    """Manage the images and layers that sandboxes open from."""


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            help="root filesystem directory, tar, `docker save` or OCI archive, or the name of a stored image"
        ),
    ],
    name: Annotated[list[str] | None, typer.Option(help="name to store it under; may be repeated")] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="additional name, such as python:3.11-slim; may be repeated")
    ] = None,
    json: Json = False,
) -> None:
    """Import an image, or give more names to a stored one."""
    from rollyard.images.store import ImageStore

    store = ImageStore()
    record = anyio.run(lambda: store.add(source, names=[*(name or []), *(alias or [])]))
    names = sorted(known for known, target in store.catalog.names().items() if target == record.id)
    if json:
        print_json({"image": record, "names": names})
    else:
        typer.echo(f"{record.id}  {', '.join(names)}")


@app.command("list")
def list_images(json: Json = False) -> None:
    """List images, snapshots and layers, oldest first."""
    from rollyard.images.store import ImageStore

    store = ImageStore()
    names = store.catalog.names()
    layers = [store.layer_record(layer) for layer in store.layers.ids()]
    if json:
        print_json({"images": store.catalog.records(), "names": names, "layers": layers})
        return
    rows = [["host", "image", "", ", ".join(known for known, target in names.items() if target == "host")]]
    for record in store.catalog.records():
        given = ", ".join(known for known, target in names.items() if target == record.id)
        rows.append([record.id, record.kind, _ago(record.created_at), given or f"from {record.source}"])
    for layer in sorted(layers, key=lambda layer: layer.created_at):
        rows.append([layer.id, "layer", _ago(layer.created_at), " ".join((*layer.spec.npm, *layer.spec.pip))])
    print_table(["id", "kind", "age", "names"], rows)


@app.command()
def rm(
    image: Annotated[str, typer.Argument(help="name, or id of an image, snapshot or layer")],
    json: Json = False,
) -> None:
    """Remove a name, an image with its last name, or a layer. Disk space is freed once it has not been opened for a day."""
    from rollyard.images.store import ImageStore

    store = ImageStore()

    async def remove() -> tuple[list[str], list[str]]:
        return await store.remove(image), await store.sweep()

    forgotten, swept = anyio.run(remove)
    if json:
        print_json({"forgotten": forgotten, "swept": swept})
    else:
        typer.echo(f"forgot {', '.join(forgotten)}" + (f"; freed {len(swept)} trees" if swept else ""))


@app.command()
def layer(
    npm: Annotated[list[str] | None, typer.Option(help="npm package, preferably NAME@VERSION; may be repeated")] = None,
    pip: Annotated[
        list[str] | None, typer.Option(help="Python package, preferably NAME==VERSION; may be repeated")
    ] = None,
    node: Annotated[str | None, typer.Option(help="oldest Node version that is enough, such as 22")] = None,
    python: Annotated[str | None, typer.Option(help="Python version to include, such as 3.12")] = None,
    json: Json = False,
) -> None:
    """Build a layer, once, and print its id and its path inside a sandbox."""
    from rollyard.images.store import ImageStore

    store = ImageStore()
    layer_id = anyio.run(lambda: store.layer(npm=npm or [], pip=pip or [], node=node, python=python))
    record = store.layer_record(layer_id)
    if json:
        print_json(record)
    else:
        typer.echo(f"{layer_id}  {record.prefix}  {record.files} files, {record.bytes >> 20} MiB")


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{letter}"
    return f"{seconds:.0f}s"
