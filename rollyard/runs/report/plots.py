"""A report as files: SVG and PNG by matplotlib, nothing fetched from anywhere.

Colours are readable in print and for colour-blind people; every number in a picture is also in the tables.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from rollyard.core.errors import MissingExtra
from rollyard.runs.report.report import Report
from rollyard.store import Store
from rollyard.store.values import line_name

Grid = Mapping[tuple[str, str], float]  # (task, line) -> mean reward
_INK = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#333333"]


async def write_report(store: Store, report: Report, folder: Path, *, html: str) -> list[Path]:
    """`report.json`, `report.txt`, `report.html` (which the page makes) and each plot as SVG and PNG. Without matplotlib there
    are no plots."""
    grid = await _grid(store, report.run_id)
    return await anyio.to_thread.run_sync(_write, report, grid, folder, html)


async def _grid(store: Store, run_id: str) -> Grid:
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in await store.lines(run_id):
        if row.reward is not None:
            rewards[row.task_id, line_name(row)].append(row.reward)
    return {cell: sum(values) / len(values) for cell, values in rewards.items()}


async def pictures(store: Store, report: Report) -> list[tuple[str, str]]:
    """Each plot as a title and an SVG element."""
    grid = await _grid(store, report.run_id)
    return await anyio.to_thread.run_sync(draw_all, report, grid)


def draw_all(report: Report, grid: Grid) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _element(_draw_figure(plot, report, grid)[0])) for name, plot in _PLOTS.items()]


def _element(svg: bytes) -> str:
    """Without the XML head, which has no place inside a page."""
    text = svg.decode()
    return text[text.index("<svg") :]


def _write(report: Report, grid: Grid, folder: Path, html: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def put(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        written.append(folder / name)

    put("report.json", msgspec.json.format(msgspec.json.encode(report), indent=2))
    put("report.txt", str(report).encode())
    put("report.html", html.encode())
    with suppress(MissingExtra):
        for name, draw in _PLOTS.items():
            svg, png = _draw_figure(draw, report, grid)
            put(f"{name}.svg", svg)
            put(f"{name}.png", png)
    return written


def _draw_figure(draw: Callable[[Any, Report, Grid], None], report: Report, grid: Grid) -> tuple[bytes, bytes]:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", why="drawing a report") from error
    with rc_context({"text.parse_math": False}):  # names of tasks are no formulas
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, report, grid)
        svg, png = io.BytesIO(), io.BytesIO()
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
        FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


def _heat(axes: Any, report: Report, grid: Grid) -> None:
    tasks = sorted({task for task, _ in grid})
    lines = [line.name for line in report.lines]
    values = [[grid.get((task, line), float("nan")) for line in lines] for task in tasks]
    if not values:
        _empty(axes, "no attempt was scored")
        return
    axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="cividis")
    axes.set_xticks(range(len(lines)), lines, rotation=20, ha="right")
    axes.set_yticks(range(len(tasks)), tasks)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            shown = "-" if value != value else f"{value:.2f}"
            axes.text(x, y, shown, ha="center", va="center", color="white" if not value > 0.6 else "black")
    axes.set_title("mean reward, task by agent")


def _rewards(axes: Any, report: Report, grid: Grid) -> None:
    names = list(report.rewards)
    axes.bar(
        names, [report.rewards[n] for n in names], color=["#999999" if n == "unscored" else _INK[0] for n in names]
    )
    axes.set(xlabel="reward (lower edge of a tenth)", ylabel="attempts", title="rewards")


def _pass_at_k(axes: Any, report: Report, grid: Grid) -> None:
    for number, line in enumerate(report.lines):
        points = [(k, i) for k, i in sorted(line.pass_at.items()) if i.value is not None]
        if not points:
            continue
        ks = [k for k, _ in points]
        colour = _INK[number % len(_INK)]
        axes.plot(ks, [i.value for _, i in points], marker="o", label=line.name, color=colour)
        known = [(k, i.low, i.high) for k, i in points if i.low is not None]
        if known:
            axes.fill_between(*zip(*known, strict=True), color=colour, alpha=0.15)
    if not axes.lines:
        _empty(axes, "no attempt was scored")
        return
    axes.set(ylim=(-0.02, 1.02), xlabel="k", ylabel="pass@k", title="at least one of k attempts solves the task (95 %)")
    axes.legend(frameon=False)


def _stages(axes: Any, report: Report, grid: Grid) -> None:
    names = list(report.stages)
    axes.barh(names, [report.stages[name][0] for name in names], color=_INK[2])
    axes.invert_yaxis()
    axes.set(xlabel="median seconds", title="time by stage")


def _tokens(axes: Any, report: Report, grid: Grid) -> None:
    names = [line.name for line in report.lines]
    prompt = [line.prompt_tokens for line in report.lines]
    axes.barh(names, prompt, color=_INK[4], label="prompt")
    axes.barh(names, [line.completion_tokens for line in report.lines], left=prompt, color=_INK[5], label="completion")
    axes.invert_yaxis()
    axes.set(xlabel="tokens", title="tokens by agent")
    axes.legend(frameon=False)


def _failures(axes: Any, report: Report, grid: Grid) -> None:
    counts = {f"{b}: {c}": n for b, causes in report.failures.items() for c, n in causes.items()}
    if not counts:
        _empty(axes, "nothing failed")
        return
    axes.barh(list(counts), list(counts.values()), color=_INK[5])
    axes.invert_yaxis()
    axes.set(xlabel="attempts", title="failures by boundary and cause")


def _empty(axes: Any, words: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)


_PLOTS: dict[str, Callable[[Any, Report, Grid], None]] = {
    "task_by_agent": _heat,
    "rewards": _rewards,
    "pass_at_k": _pass_at_k,
    "time_by_stage": _stages,
    "tokens_by_agent": _tokens,
    "failures": _failures,
}
