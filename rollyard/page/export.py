"""A run as one HTML file: its report, its plots and its rollouts step by step. Nothing is fetched, and nothing runs but our own
script that sorts tables, which the file's content security policy names by its digest.

A page, not a dump: of a very large run it holds the first rollouts and says how many are missing; `rollyard export` has them all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from markupsafe import Markup

from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.page import steps
from rollyard.page.drawing import forest, timeline
from rollyard.page.rendering import environment
from rollyard.runs.report.compare import compare_lines
from rollyard.runs.report.plots import pictures
from rollyard.runs.report.report import Report, report, run_prices
from rollyard.runs.report.spending import cost, find_price
from rollyard.store import Store
from rollyard.store.values import RolloutRow, line_name, row_of

ROLLOUTS = 200
STEPS = 40
GRID = 500  # tasks
_SCRIPT = Path(__file__).parent / "static" / "sort.js"
_STYLE = Path(__file__).parent / "static" / "style.css"


async def run_page(store: Store, run_id: str) -> tuple[str, str]:
    """The run's whole id, and the file's text."""
    kind, run_id = await store.resolve(run_id)
    if kind != "run":
        raise ConfigError(f"{run_id!r} is a rollout; a page is made of a run")
    info = await store.get_run(run_id)
    made = await report(store, run_id)
    try:
        drawn = [(name, Markup(svg)) for name, svg in await pictures(store, made)]  # noqa: S704 - matplotlib's own, escaped
    except MissingExtra:  # without matplotlib the file has the tables alone
        drawn = []
    prices = run_prices(info)
    shown: list[dict[str, Any]] = []
    async for rollout in store.rollouts(run_id, trajectories=True):
        if len(shown) == ROLLOUTS:
            break
        branches = rollout.captured.branches
        nodes = branches[0].nodes if branches else ()
        price = find_price(prices, rollout.labels.get("policy"))
        spent = steps.CallCosts(records={record.id: record for record in rollout.captured.records}, price=price)
        shown.append(
            {
                "rollout": rollout,
                "cost": cost(prices, row_of(rollout)),
                "timeline": timeline(rollout, rollout.captured.records),
                "steps": steps.show(nodes[:STEPS], 0, spent),
                "total": len(nodes),
                "branches": len(branches),
                "diff": steps.diff_lines(rollout.diff or ""),
            }
        )
    rows = await store.lines(run_id)
    pairs = await anyio.to_thread.run_sync(compare_lines, rows)
    sections = {one["rollout"].id for one in shown}
    script = await anyio.Path(_SCRIPT).read_text()
    template = environment().get_template("export.html")
    style = Markup(await anyio.Path(_STYLE).read_text())  # noqa: S704 - our own file
    fields = {
        "run": info,
        "report": made,
        "pictures": drawn,
        "rollouts": shown,
        "forest": forest(made.lines),
        "pairs": pairs,
        "grid": [(task, _cells(made, task, rows, sections)) for task in sorted({row.task_id for row in rows})[:GRID]],
        "ks": sorted({k for line in made.lines for k in line.pass_at}),
        "merged": any(line.merged is not None for line in made.lines),
        "invalid": any(line.invalid for line in made.lines),
        "style": style,
        "script": Markup(script),  # noqa: S704 - our own file
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "cut": steps.shorten,
        "currency": info.config.get("currency", ""),
    }
    return run_id, await anyio.to_thread.run_sync(lambda: template.render(**fields))


def _cells(
    made: Report, task: str, rows: Sequence[RolloutRow], sections: set[str]
) -> list[tuple[float | None, str | None]]:
    """For each line of the report its mean reward at the task, and the section of its first attempt."""
    cells: list[tuple[float | None, str | None]] = []
    for line in made.lines:
        own = [row for row in rows if row.task_id == task and line_name(row) == line.name]
        rewards = [row.reward for row in own if row.reward is not None]
        section = next((row.id for row in own if row.id in sections), None)
        cells.append((sum(rewards) / len(rewards) if rewards else None, section))
    return cells


async def export_page(where: str, run: str, out: str) -> tuple[str, int]:
    """Write it; gives the run's id and the file's size."""
    async with Store.open(where, create=False) as store:
        run_id, text = await run_page(store, run)
    await anyio.Path(out).write_text(text)
    return run_id, len(text.encode())
