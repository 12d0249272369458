"""`rollyard plane`: what the operator of a control plane does beside its servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import anyio
import typer

from rollyard.cli.verb_app import new_group

app = new_group()
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
    """Manage a control plane's keys, owners, quotas, instances and secrets."""


@app.command("rotate-secret")
def rotate_secret(
    signing_file: Annotated[
        Path | None, typer.Option(help="file of `serve plane --signing-file`; the default one without it")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Replace the secret that signs a control plane's URLs and tokens. What it signed ends when the servers restart."""
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
    role: Annotated[str, typer.Argument(help="admin, owner, trainer, agent or metrics")],
    owner: Annotated[str, typer.Argument(help="whose it is")],
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Create an API key. It is shown only once."""
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
    """Revoke an API key: at once on the server that is asked, within seconds on other replicas."""
    _ask(url, key, "DELETE", f"/v1/keys/{key_id}")
    _print({"revoked": key_id}) if as_json else typer.echo(f"{key_id} is revoked")


@app.command()
def owner(
    name: Annotated[str, typer.Argument(help="the owner")], url: Url = _HERE, key: Key = "", as_json: Json = False
) -> None:
    """Show an owner's use, quota and rate."""
    _show_owner(_ask(url, key, "GET", f"/v1/usage?owner={quote(name)}"), as_json)


@app.command()
def quota(
    name: Annotated[str, typer.Argument(help="the owner")],
    instances: Annotated[int | None, typer.Argument(help="most instances at once")] = None,
    rate: Annotated[float | None, typer.Option(help="most creations a second; 0: no limit")] = None,
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Change how many instances an owner may have, and how many it may make in a second."""
    terms = {word: value for word, value in (("quota", instances), ("rate", rate)) if value is not None}
    _ask(url, key, "PUT", f"/v1/owners/{quote(name)}", terms)
    _show_owner(_ask(url, key, "GET", f"/v1/usage?owner={quote(name)}"), as_json)


@app.command()
def instances(
    owner: Annotated[str | None, typer.Option(help="of this owner alone")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="those that have ended, instead of those that live")] = False,
    limit: Annotated[int, typer.Option(help="at most this many", min=1, max=500)] = 50,
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """List instances, the newest first."""
    from rollyard.cli.printing import print_table

    query = {"limit": limit, "live": "false" if ended else "true", **({"owner": owner} if owner else {})}
    found = _ask(url, key, "GET", f"/v1/instances?{urlencode(query)}")["items"]
    if as_json:
        _print(found)
        return
    rows = [[one["id"], one["state"], one["owner"], one["engine"], one["env"] or one["image"] or ""] for one in found]
    print_table(("instance", "state", "owner", "engine", "environment"), rows)


@app.command()
def events(
    instance: Annotated[str, typer.Argument(help="id of the instance, also of one that has ended")],
    url: Url = _HERE,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Show the history of an instance: its states with times and reasons."""
    from rollyard.cli.printing import print_table

    found = _ask(url, key, "GET", f"/v1/instances/{quote(instance)}/history")
    if as_json:
        _print(found)
        return
    rows = [[line["at"], line["state"], line.get("reason") or ""] for line in found["history"]]
    print_table(("at", "state", "reason"), rows)


def _show_owner(used: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print(used)
    else:
        typer.echo(f"{used['owner']}: {used['used']} instances, limit {used['limit']}, rate {used['rate']}")


def _ask(url: str, key: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    from rollyard.plane.client.plane import Plane

    async def work() -> dict[str, Any]:
        async with Plane(url, key) as plane:
            if method == "DELETE":
                await plane.bytes(method, path)
                return {}
            return await plane.json(method, path, body)

    return anyio.run(work)


def _print(value: Any) -> None:
    from rollyard.cli.printing import print_json

    print_json(value)
