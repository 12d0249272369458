"""`rollyard check sandbox NAME`: the conformance suite on any backend."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer


def sandbox(
    name: Annotated[str, typer.Argument(help="backend name (local, docker, ...) or package.module:attribute")],
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE option of the backend; may be repeated")] = None,
    image: Annotated[str, typer.Option(help="image to open sandboxes from")] = "host",
    only: Annotated[str | None, typer.Option(help="only the cases of one letter (F: files) or one id (E9)")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="include the cases that take minutes")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the outcomes as JSON")] = False,
) -> None:
    """Run the conformance suite on a backend. Skipped cases give the reason. Exit code 3 when a case failed."""
    from rollyard.cli.printing import print_json
    from rollyard.testing.sandbox.verdict import SandboxTotals, examine_backend

    async def run() -> SandboxTotals:
        async with examine_backend(name, option or [], image) as examination:
            async for outcome in examination.outcomes(only=only, slow=slow):
                if not json:
                    why = f"  ({outcome.why})" if outcome.why else ""
                    typer.echo(f"{outcome.result:8} {outcome.id:4} {outcome.title}{why}")
            return examination.totals()

    totals = anyio.run(run)
    if json:
        print_json(totals)
    else:
        typer.echo(totals.line)
    if totals.failed:
        raise typer.Exit(3)
