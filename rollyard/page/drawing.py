"""Pictures of a rollout as SVG, made on the server: the graph of branches and the timeline. Shapes and numbers only; the text
in them is escaped here, and colours come from the style sheet by class. What would be thousands of shapes is thinned out."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from rollyard.core.call import CallRecord
from rollyard.core.rollout import Rollout
from rollyard.runs.report.report import ReportRow
from rollyard.trajectory.branch import Branch

_W, _ROW, _LEFT = 960, 20, 120
_DOTS, _ROWS, _BARS = 160, 24, 400
_SPARK_W, _SPARK_H = 400, 36
_AGENT = ("launch", "wait")

Point = tuple[float, float]


def branch_graph(branches: Sequence[Branch]) -> Markup:
    """A row per branch; nodes that branches share stand in the first one, and a curve leaves where they part."""
    if not branches:
        return Markup("")
    place: dict[int, Point] = {}
    out: list[str] = []
    longest = max(len(branch.nodes) for branch in branches)
    stride = max(1, -(-longest // _DOTS))
    step = min(26.0, (_W - _LEFT - 16) / max(1, longest - 1))
    for row, branch in enumerate(branches[:_ROWS]):
        out += _row(branch, row, step, stride, place)
    rest = len(branches) - _ROWS
    height = 12 + min(len(branches), _ROWS) * _ROW + (_ROW if rest > 0 else 0)
    if rest > 0:
        out.append(f'<text x="4" y="{height - 8}">and {rest} more branches</text>')
    words = f"{len(branches)} branches of the trajectory, {longest} messages in the longest"
    head = f'<svg class="graph" viewBox="0 0 {_W} {height}" role="img" aria-label="{words}">'
    return Markup(head + "".join(out) + "</svg>")  # noqa: S704 - shapes only, the labels are escaped


def _row(branch: Branch, row: int, step: float, stride: int, place: dict[int, Point]) -> list[str]:
    y = 16.0 + row * _ROW
    before: Point | None = None
    line: list[Point] = []
    dots: list[str] = []
    last = len(branch.nodes) - 1
    for column, node in enumerate(branch.nodes):
        known = place.get(node.id)
        at = known or (_LEFT + column * step, y)
        if known is None:
            place[node.id] = at
            if not line and before is not None:
                line.append(before)
            line.append(at)
            if column % stride == 0 or column == last:
                size = 4.5 if node.sampled else 3
                kind = f"node {branch.kind} {'sampled' if node.sampled else 'context'}"
                dots.append(f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{size}"/>')
        before = at
    label = f'<text x="4" y="{y + 4}">{escape(f"{branch.index} {branch.kind}")}</text>'
    return [*([_edge(line)] if len(line) > 1 else []), *dots, label]


def _edge(line: Sequence[Point]) -> str:
    """From where the branch parts to its end."""
    (x, y), (next_x, next_y), (end_x, _) = line[0], line[1], line[-1]
    middle = (x + next_x) / 2
    start = f"M{x:.1f} {y:.1f}"
    curve = "" if y == next_y else f"C{middle:.1f} {y:.1f} {middle:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}"
    return f'<path class="edge" d="{start}{curve}H{end_x:.1f}"/>'


def sparkline(values: Sequence[float | None]) -> Markup:
    """The course of a number between 0 and 1 (beyond them, of its own range); a gap where it is not known."""
    known = [value for value in values if value is not None]
    if not known:
        return Markup("")
    low, high = min(0.0, *known), max(1.0, *known)
    step = _SPARK_W / max(1, len(values) - 1)
    lines: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            lines.append([])
        else:
            lines[-1].append(f"{place * step:.1f},{_SPARK_H - (value - low) / (high - low) * _SPARK_H:.1f}")
    drawn = "".join(f'<polyline points="{" ".join(line)}"/>' for line in lines if line)
    words = f"from {known[0]:.2f} to {known[-1]:.2f}"
    head = (
        f'<svg class="sparkline" viewBox="-2 -2 {_SPARK_W + 4} {_SPARK_H + 4}" preserveAspectRatio="none" role="img" '
    )
    return Markup(f'{head}aria-label="{words}"><title>{words}</title>{drawn}</svg>')  # noqa: S704 - numbers only


def forest(lines: Sequence[ReportRow]) -> Markup:
    """The mean reward of each line with its interval, below each other on one scale."""
    known = [(line, line.reward.value) for line in lines if line.reward.value is not None]
    if not known:
        return Markup("")
    low = min(0.0, *(line.reward.low or 0.0 for line, _ in known))
    high = max(1.0, *(line.reward.high or value for line, value in known))
    left, wide, bottom = 220, _W - 300, 14 + len(known) * 24

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * wide

    out: list[str] = []
    for part in range(5):
        value = low + (high - low) * part / 4
        out.append(f'<path class="grid" d="M{place(value):.1f} 6V{bottom}"/>')
        out.append(f'<text x="{place(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value:.2f}</text>')
    for row, (line, value) in enumerate(known):
        y = 18 + row * 24
        out.append(f'<text x="4" y="{y + 4}">{escape(line.name[:34])}</text>')
        if line.reward.low is not None and line.reward.high is not None:
            out.append(f'<path class="range" d="M{place(line.reward.low):.1f} {y}H{place(line.reward.high):.1f}"/>')
        out.append(f'<circle class="mean" cx="{place(value):.1f}" cy="{y}" r="5"/>')
        out.append(f'<text x="{_W - 70}" y="{y + 4}">{value:.3f}</text>')
    head = (
        f'<svg class="forest" viewBox="0 0 {_W} {bottom + 20}" role="img" aria-label="mean reward with 95 % intervals">'
    )
    return Markup(head + "".join(out) + "</svg>")  # noqa: S704 - shapes only, the names are escaped above


def timeline(rollout: Rollout, records: Sequence[CallRecord]) -> Markup:
    """Three lanes on one scale: the sandbox and what is done around the agent, the agent, the model's calls."""
    start, total = rollout.started_at, max(rollout.wall_s, 0.001)
    wide = _W - _LEFT - 8
    out: list[str] = []

    def bar(kind: str, at: float, took: float, lane: int, words: str) -> None:
        x = _LEFT + min(1.0, max(0.0, (at - start) / total)) * wide
        width = max(1.5, min(took / total, 1.0) * wide)
        out.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{6 + lane * 22}" width="{width:.1f}" height="16" rx="2">'
            f"<title>{escape(words)}</title></rect>"
        )

    for lane, name in enumerate(("sandbox", "agent", "model")):
        out.append(f'<text x="4" y="{18 + lane * 22}">{name}</text>')
        out.append(f'<rect class="lane" x="{_LEFT}" y="{6 + lane * 22}" width="{wide}" height="16" rx="2"/>')
    for stage in rollout.stages:
        words = f"{stage.name}: {stage.duration_s:.3f} s"
        bar(f"stage-{stage.name}", stage.started_at, stage.duration_s, int(stage.name in _AGENT), words)
    answered = [record for record in records if record.finished_at is not None]
    for record in answered[:: max(1, -(-len(answered) // _BARS))]:
        took = (record.finished_at or 0.0) - record.received_at
        bar(f"call-{record.kind}", record.received_at, took, 2, f"{record.kind} call: {took:.3f} s")
    for part in range(5):
        anchor = "end" if part == 4 else "start" if part == 0 else "middle"
        x = _LEFT + wide * part / 4
        out.append(f'<text x="{x:.0f}" y="86" text-anchor="{anchor}">{total * part / 4:.2f} s</text>')
    head = f'<svg class="timeline" viewBox="0 0 {_W} 92" role="img" aria-label="time of sandbox, agent and model">'
    return Markup(head + "".join(out) + "</svg>")  # noqa: S704 - shapes only, the titles are escaped above
