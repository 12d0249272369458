"""`rollyard push`: a task folder, an aenv project or an OpenEnv package, to a control plane's hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from rollyard.cli.printing import print_json
from rollyard.cli.verb_app import new_verb

app = new_verb()


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Harbor task folder, aenv project or OpenEnv package")],
    url: Annotated[str, typer.Option(envvar="ROLLYARD_URL", help="URL of the control plane")] = "http://127.0.0.1:8600",
    key: Annotated[
        str,
        typer.Option(
            envvar="ROLLYARD_KEY", help="API key; prefer the variable, since arguments are visible to other users"
        ),
    ] = "",
    name: Annotated[str | None, typer.Option(help="environment name, instead of the folder's own")] = None,
    version: Annotated[str | None, typer.Option(help="environment version, instead of the folder's own")] = None,
    image: Annotated[str | None, typer.Option(help="image name on the plane's engines")] = None,
    release: Annotated[bool, typer.Option(help="make the version immutable")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the environment as JSON")] = False,
) -> None:
    """Upload a folder as a bundle and register it as an environment version."""
    from rollyard.plane.client.plane import Plane
    from rollyard.plane.client.push import push as pushed

    async def work() -> dict[str, Any]:
        async with Plane(url, key) as plane:
            return await pushed(plane, folder, name=name, version=version, image=image, release=release)

    record = anyio.run(work)
    if as_json:
        print_json(record)
        return
    sha256 = record["spec"]["artifacts"]["bundle"]
    typer.echo(f"{record['id']} revision {record['revision']} {record['status']}, bundle {sha256[:12]}")
