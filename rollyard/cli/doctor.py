"""`rollyard doctor`: what this machine can do, and one line of advice for each thing it cannot."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)
MARKS = {"ok": "ok", "weak": "weak", "bad": "BAD", "absent": "-"}


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False) -> None:
    """Test what sandboxes and agents need on this machine. Exit code 3 when something required does not work."""
    from rollyard.cli.printing import print_json, print_table
    from rollyard.runs.doctor import examine, healthy

    findings = anyio.run(examine)
    if json:
        print_json({"healthy": healthy(findings), "findings": findings})
    else:
        rows = [
            [
                MARKS[found.state],
                found.group,
                found.name,
                found.found + (f"  -> {found.advice}" if found.advice else ""),
            ]
            for found in findings
        ]
        print_table(["", "group", "what", "found"], rows)
    if not healthy(findings):
        raise typer.Exit(3)
