"""`rollyard plane`: what the operator of a control plane does beside its servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

app = typer.Typer(help="keep a control plane's keys, owners and secrets", no_args_is_help=True, rich_markup_mode=None)
Url = Annotated[str, typer.Option(envvar="ROLLYARD_URL", help="URL of the control plane")]
Key = Annotated[
    str,
    typer.Option(
        envvar="ROLLYARD_KEY", help="admin's API key; prefer the variable, since arguments are visible to others"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
_HERE = "http://127.0.0.1:8600"


@app.callback()
def plane() -> None:
    """Keep a control plane's keys, owners and secrets."""


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


@app.command()
def keys(url: Url = _HERE, key: Key = "", as_json: Json = False) -> None:
    """List API keys, without the keys themselves."""
    found = _ask(url, key, "GET", "/v1/keys")["items"]
    if as_json:
        _print(found)
        return
    for one in found:
        state = "revoked" if one.get("revoked_at") else "in use"
        typer.echo(f"{one['id']}  {one['role']:8} {one['owner']:20} {state}")


@app.command("new-key")
def new_key(
    role: Annotated[str, typer.Argument(help="admin, owner, trainer or agent")],
    owner: Annotated[str, typer.Argument(help="whose it is")],
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Make an API key. It is shown this once."""
    made = _ask(url, key, "POST", "/v1/keys", {"role": role, "owner": owner})
    if as_json:
        _print(made)
    else:
        typer.echo(f"{made['id']}\n{made['key']}")


@app.command("revoke-key")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="id of the key, as `rollyard plane keys` lists it")],
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """End an API key: at once on the replica that is asked, and within seconds on the others."""
    _ask(url, key, "DELETE", f"/v1/keys/{key_id}")
    _print({"revoked": key_id}) if as_json else typer.echo(f"{key_id} is revoked")


@app.command()
def owner(
    name: Annotated[str, typer.Argument(help="the owner")],
    quota: Annotated[int | None, typer.Option(help="most instances at once")] = None,
    rate: Annotated[float | None, typer.Option(help="most creations a second; 0: no limit")] = None,
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Show an owner's use, quota and rate, or change the quota and the rate."""
    terms = {word: value for word, value in (("quota", quota), ("rate", rate)) if value is not None}
    if terms:
        _ask(url, key, "PUT", f"/v1/owners/{name}", terms)
    used = _ask(url, key, "GET", f"/v1/usage?owner={name}")
    if as_json:
        _print(used)
    else:
        typer.echo(f"{used['owner']}: {used['used']} instances, limit {used['limit']}, rate {used['rate']}")


def _ask(url: str, key: str, method: str, path: str, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    from rollyard.plane.client.plane import Plane

    async def work() -> dict[str, Any]:
        async with Plane(url, key) as plane:
            if method == "DELETE":
                await plane.bytes(method, path)
                return {}
            return await plane.json(method, path, asked)

    return anyio.run(work)


def _print(value: Any) -> None:
    from rollyard.cli.printing import print_json

    print_json(value)
