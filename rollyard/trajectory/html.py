"""A trajectory as a notebook shows it: its calls in commit order, and what each of them added."""

from __future__ import annotations

from rollyard.core.html import MOST, block, draw_turn, fold, line, table
from rollyard.trajectory.trajectory import Trajectory
from rollyard.trajectory.turns import turns

_CALLS = ("call", "kind", "edge", "model", "finish", "tokens in", "out", "capture", "error")


def draw_trajectory(trajectory: Trajectory) -> str:
    records = trajectory.records
    rows = [
        (
            record.id,
            record.kind,
            record.edge if record.break_reason is None else f"{record.edge} ({record.break_reason})",
            record.model_served or record.model_requested,
            record.finish,
            record.usage.prompt_tokens,
            record.usage.completion_tokens,
            record.capture,
            record.error or "",
        )
        for record in records
    ]
    head = line(f"{trajectory.rollout_id}: {len(records)} calls, {len(trajectory.branches)} branches")
    return block(head, table(_CALLS, rows), fold("what was said", *map(draw_turn, turns(trajectory)[:MOST])))
