"""`rollyard doctor`: what this machine can do, and one line of advice for each thing it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import anyio
import typer

from rollyard.cli.verb_app import new_verb

app = new_verb()
MARKS = {"ok": "ok", "weak": "weak", "bad": "BAD", "absent": "-"}


@app.command()
def doctor(
    sandbox: Annotated[
        str | None, typer.Option(help="use this sandbox backend once and time it, instead of examining the machine")
    ] = None,
    image: Annotated[str | None, typer.Option(help="with --sandbox: the image to open")] = None,
    base_url: Annotated[str | None, typer.Option(help="examine this model server instead of the machine")] = None,
    model: Annotated[str | None, typer.Option(help="the model to ask for, where the server has several")] = None,
    key_env: Annotated[str | None, typer.Option(help="variable that holds the server's key")] = None,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="measure how many agents this machine carries, awake and asleep")
    ] = False,
    agent: Annotated[
        list[str] | None, typer.Option(help="with --capacity: only this agent; may be repeated (unset: all installed)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Test what sandboxes and agents need on this machine. Exit code 3 when something required does not work.

    With --base-url, test a model server instead: token ids, logprobs, tools, thinking, and what to start it with. With --sandbox,
    time how long a backend takes to open, run, upload and kill. With --capacity, measure how many agents fit into memory.
    """
    from rollyard.cli.printing import print_json, print_table
    from rollyard.core.errors import ConfigError
    from rollyard.runs.doctor import examine, healthy
    from rollyard.runs.doctor_sandbox import examine_sandbox
    from rollyard.runs.doctor_server import examine_server

    if sum((sandbox is not None, base_url is not None, capacity)) > 1:
        raise ConfigError(
            "--sandbox, --base-url and --capacity are examinations of their own", hint="ask for one at a time"
        )
    if agent and not capacity:
        raise ConfigError("--agent names what --capacity measures", hint="add --capacity")
    if image is not None and sandbox is None:
        raise ConfigError("--image is of a sandbox backend", hint="name it with --sandbox NAME")
    if base_url is None and (model is not None or key_env is not None):
        raise ConfigError("--model and --key-env are of a model server", hint="name it with --base-url URL")
    if capacity:
        _print_capacity(agent or (), json)
        return
    if base_url is not None:
        findings = anyio.run(examine_server, base_url, model, key_env)
    elif sandbox is not None:
        findings = anyio.run(examine_sandbox, sandbox, image or "host")
    else:
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


def _print_capacity(agents: Sequence[str], json: bool) -> None:
    from rollyard.cli.printing import print_json, print_table, print_text
    from rollyard.runs.doctor_capacity import examine_capacity

    found = anyio.run(examine_capacity, agents)
    if json:
        print_json(found)
    else:
        print_text(
            f"memory {found.total_mb} MB, available {found.available_mb} MB, of which {found.head_room_mb} MB stay free; "
            f"swap {found.swap_mb} MB"
        )
        asleep = () if found.no_sleep else ("asleep, MB", "paged out, MB", "fit")
        header = ["agent", "shared, MB", "awake, MB", "fit", *asleep]
        measured = [row for row in found.agents if row.awake is not None]
        cells = [
            ["-" if value is None else str(value) for value in values]
            for values in (
                (row.shared_mb, row.awake_mb, row.awake, row.asleep_mb, row.paged_out_mb, row.asleep)
                for row in measured
            )
        ]
        if measured:
            rows = zip(measured, cells, strict=True)
            print_table(header, [[row.agent, *values][: len(header)] for row, values in rows])
        for row in found.agents:
            if row.problem:
                print_text(row.missing)
        if found.no_sleep:
            print_text(f"asleep: not measured. {found.no_sleep}")
    failed = [row.awake is None for row in found.agents]
    if any(failed) if agents else all(failed):  # an agent that only runs with tools of a task says so, and is no fault
        raise typer.Exit(3)
