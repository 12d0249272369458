"""`rollyard export RUN --format F --out FILE`: rows for programs, or one HTML page for people."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from rollyard.cli.shared_options import StoreOption
from rollyard.cli.verb_app import new_verb
from rollyard.core.home import STORE

app = new_verb()


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="run id, or the start of it")],
    out: Annotated[str, typer.Option(help="file to write (a directory for atif, a new one for harbor)")],
    format: Annotated[
        str | None,
        typer.Option(
            help="jsonl, turns, samples, parquet, atif, inspect, harbor or html; by default from the suffix of --out"
        ),
    ] = None,
    store: StoreOption = STORE,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="of turns and training rows: only those of this kind of call (agent, subagent, compaction, auxiliary, user, "
            "discarded); may be given again"
        ),
    ] = None,
    unscored: Annotated[
        bool, typer.Option("--unscored", help="include training rows of rollouts without a reward")
    ] = False,
    valid_only: Annotated[
        bool,
        typer.Option("--valid-only", help="leave out rollouts whose reward a scan or a label calls invalid"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print a summary as JSON")] = False,
) -> None:
    """Write all rollouts of a run to a file. Branches that cannot be proved are left out and listed in OUT.refused.jsonl."""
    from rollyard.cli.printing import print_json
    from rollyard.core.numbers import count

    if out == "-":
        raise typer.BadParameter("name a file: what is left out is listed beside it", param_hint="--out")
    page = format == "html" or (format is None and out.endswith(".html"))
    if page and valid_only:
        raise typer.BadParameter("a page shows every rollout", param_hint="--valid-only")
    if page and unscored:
        raise typer.BadParameter("a page shows every rollout", param_hint="--unscored")
    if page and kind:
        raise typer.BadParameter("a page shows every kind of call", param_hint="--kind")
    if page:
        from rollyard.page.export import export_page

        run_id, size = anyio.run(export_page, store, run, out)
        if json:
            print_json({"run": run_id, "path": out, "bytes": size})
        else:
            typer.echo(f"run {run_id} as one page in {out}")
        return
    from rollyard.runs.scan.scan import find_refuse
    from rollyard.store.exports.export import export_run

    done = anyio.run(export_run, store, run, out, format, kind or None, unscored, find_refuse if valid_only else None)
    if json:
        print_json(done)
        return
    typer.echo(f"{count(done.rows, 'row')} of {count(done.rollouts, 'rollout')} in {done.path}")
    if done.dropped:
        typer.echo(f"rollouts left out, whose reward is invalid: {done.dropped}; the reasons are in {done.refused_at}")
    if done.refused:
        typer.echo(f"branches left out: {done.refused}; the reasons are in {done.refused_at}")
