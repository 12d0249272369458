"""A run as one HTML file: its report, its plots and its rollouts step by step, with nothing fetched and nothing executed.

A page, not a dump: of a very large run it holds the first rollouts and says how many are missing; `rollyard export` has them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
from markupsafe import Markup

from rollyard.core.errors import ConfigError, MissingExtra
from rollyard.page import steps
from rollyard.page.drawing import timeline
from rollyard.page.rendering import environment
from rollyard.runs.report.plots import pictures
from rollyard.runs.report.report import report, run_prices
from rollyard.runs.report.spending import cost, find_price
from rollyard.store import Store
from rollyard.store.values import row_of

ROLLOUTS = 200
STEPS = 40
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
    template = environment().get_template("export.html")
    style = Markup(await anyio.Path(_STYLE).read_text())  # noqa: S704 - our own file
    fields = {"run": info, "report": made, "pictures": drawn, "rollouts": shown, "style": style, "cut": steps.cut}
    return run_id, await anyio.to_thread.run_sync(lambda: template.render(**fields))


async def export_page(where: str, run: str, out: str) -> tuple[str, int]:
    """Write it; gives the run's id and the file's size."""
    async with Store.open(where, create=False) as store:
        run_id, text = await run_page(store, run)
    await anyio.Path(out).write_text(text)
    return run_id, len(text.encode())
