"""`rollyard check run RUN`: the laws of every trajectory of a run, and what was counted on the way."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.store_option import StoreOption
from rollyard.core.home import STORE


def run(
    run: Annotated[str, typer.Argument(help="run id, or the start of it")],
    store: StoreOption = STORE,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Check that every token is accounted for: prefix law, single training, logprobs, masks, bodies. Exit code 3 when a
    law is broken."""
    from rollyard.cli.printing import print_json
    from rollyard.store.listing import check_run

    found = anyio.run(check_run, store, run)
    if json:
        print_json({"ok": found.ok, **{name: getattr(found, name) for name in found.__struct_fields__}})
    else:
        for name in found.__struct_fields__:
            value = getattr(found, name)
            if name != "findings":
                typer.echo(f"{name:16} {value if not hasattr(value, 'items') else _tally(value)}")
        for finding in found.findings:
            typer.echo(f"BROKEN  {finding.law}: {finding.rollout_id} {finding.where}: {finding.detail}")
        typer.echo("every law holds" if found.ok else f"{len(found.findings)} findings")
    if not found.ok:
        raise typer.Exit(3)


def _tally(value: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(value.items())) or "-"
