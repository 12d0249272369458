"""`rollyard image add|pull|list|rm|layer`: the images and layers that sandboxes open from."""

from __future__ import annotations

import time
from typing import Annotated

import anyio
import typer

from rollyard.cli.printing import print_json, print_table
from rollyard.cli.verb_app import new_group

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


@app.command()
def pull(
    reference: Annotated[
        str, typer.Argument(help="[http[s]://][REGISTRY/]REPOSITORY[:TAG][@DIGEST], such as python:3.12-slim")
    ],
    mirror: Annotated[
        list[str] | None, typer.Option(help="http[s]://HOST[:PORT] to ask before the registry; may be repeated")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="OS/ARCHITECTURE[/VARIANT], such as linux/arm64 (unset: this machine's)")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="name to store it under, instead of its reference; may be repeated"),
    ] = None,
    pull_from: Annotated[
        list[str] | None,
        typer.Option("--pull", help="another server that the registry may lead to: [http://]HOST[:PORT][@ADDRESS]"),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that it may take")] = 3600.0,
    json: Json = False,
) -> None:
    """Fetch an image from a registry, without a container engine. Layers that are here are not fetched again.

    Credentials are read as `docker login` keeps them, or from DOCKER_AUTH_CONFIG. A pull that broke off goes on where it was.
    """
    import sys

    from rollyard.cli.pull_progress import show_progress
    from rollyard.core.errors import ConfigError
    from rollyard.images.manifests import parse_platform, this_platform
    from rollyard.images.reference import parse_reference
    from rollyard.images.registries import read_registries, rule_for_reference
    from rollyard.images.store import ImageStore

    scheme, _, image = reference.rpartition("://")
    if scheme not in ("", "http", "https"):
        raise ConfigError(f"{scheme}:// is not how a registry is reached", hint="http:// or https://")
    found = parse_reference(image)
    registries = read_registries(pull_from or (), mirrors={found.registry: mirror or ()})
    registries = registries.with_registry(rule_for_reference(found, secure=scheme == "https" if scheme else None))
    wanted = parse_platform(platform) if platform is not None else this_platform()
    foreign = (wanted.os, wanted.architecture) != (this_platform().os, this_platform().architecture)
    names = name if name else [] if foreign else None
    with show_progress(image, shown=not json and sys.stderr.isatty()) as on_progress:
        done = anyio.run(
            lambda: ImageStore().pull(
                image, registries, names=names, platform=wanted, timeout_s=timeout, on_progress=on_progress
            )
        )
    if json:
        print_json(done)
        return
    typer.echo(f"{done.record.id}  {', '.join([image] if names is None else names)}".rstrip())
    here = done.layers - done.fetched_layers
    typer.echo(done.digest)
    typer.echo(
        f"{done.fetched_layers} of {done.layers} layers fetched from {done.endpoint}, {done.fetched_bytes / 2**20:.1f} MiB"
        + (f"; {here} were here" if here else "")
    )
    if foreign and not name:
        typer.echo(f"It is for {wanted.text}: open it by its id, or name it with --name.")


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
