"""Pictures of a rollout as SVG, made on the server: the graph of branches and the timeline. Shapes and numbers only; the text
in them is escaped here, and colours come from the style sheet by class."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from rollyard.core.branch import Branch
from rollyard.core.call import CallRecord
from rollyard.core.rollout import Rollout

_W, _ROW = 900, 18
_MAX_NODES = 1200


def branch_graph(branches: Sequence[Branch]) -> Markup:
    """A row per branch; nodes that branches share stand in the first one, and a curve leaves where they part."""
    if not branches:
        return Markup("")
    place: dict[int, tuple[float, float]] = {}
    out: list[str] = []
    longest = max(len(branch.nodes) for branch in branches)
    step = min(26.0, (_W - 120) / max(1, longest))
    for row, branch in enumerate(branches[:40]):
        y = 14 + row * _ROW
        before: tuple[float, float] | None = None
        for column, node in enumerate(branch.nodes[:_MAX_NODES]):
            known = place.get(node.id)
            at = known or (110 + column * step, y)
            if known is None:
                place[node.id] = at
                if before is not None:
                    out.append(_line(before, at))
                size = 4 if node.sampled else 2.5
                kind = f"node {branch.kind} {'sampled' if node.sampled else 'context'}"
                out.append(f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{size}"/>')
            before = at
        out.append(f'<text x="4" y="{y + 4}">{escape(f"{branch.index} {branch.kind}")}</text>')
    height = 20 + min(len(branches), 40) * _ROW
    head = f'<svg class="graph" viewBox="0 0 {_W} {height}" role="img" aria-label="branches of the trajectory">'
    return Markup(head + "".join(out) + "</svg>")  # noqa: S704 - shapes only, the labels are escaped above


def _line(a: tuple[float, float], b: tuple[float, float]) -> str:
    if a[1] == b[1]:
        return f'<path class="edge" d="M{a[0]:.1f} {a[1]:.1f}H{b[0]:.1f}"/>'
    middle = (a[0] + b[0]) / 2
    curve = f"C{middle:.1f} {a[1]:.1f} {middle:.1f} {b[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
    return f'<path class="edge" d="M{a[0]:.1f} {a[1]:.1f}{curve}"/>'


def timeline(rollout: Rollout, records: Sequence[CallRecord]) -> Markup:
    """Stages above, model calls below, on one scale from the rollout's start to its end."""
    start = rollout.started_at
    total = max(rollout.wall_s, 0.001)
    out: list[str] = []

    def bar(kind: str, at: float, took: float, y: int, words: str) -> None:
        x = 4 + max(0.0, (at - start) / total) * (_W - 8)
        width = max(1.0, took / total * (_W - 8))
        out.append(
            f'<rect class="bar {kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="14">'
            f"<title>{escape(words)}</title></rect>"
        )

    for stage in rollout.stages:
        bar(f"stage-{stage.name}", stage.started_at, stage.duration_s, 4, f"{stage.name}: {stage.duration_s:.3f} s")
    for record in records[:2000]:
        if record.finished_at is not None:
            took = record.finished_at - record.received_at
            bar(f"call-{record.kind}", record.received_at, took, 24, f"{record.kind} call: {took:.3f} s")
    out.append(f'<text x="4" y="56">0</text><text x="{_W - 70}" y="56">{total:.2f} s</text>')
    head = f'<svg class="timeline" viewBox="0 0 {_W} 60" role="img" aria-label="time of stages and model calls">'
    return Markup(head + "".join(out) + "</svg>")  # noqa: S704 - shapes only, the titles are escaped above
