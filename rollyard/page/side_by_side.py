"""Two rollouts side by side: what they have in common once, and both from where they first differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollyard.core.node import Node
from rollyard.core.rollout import Rollout
from rollyard.page import steps
from rollyard.page.rollouts import STEPS, call_costs, find_rollout, find_terms
from rollyard.store import Store


async def show_sides(store: Store, first: str, second: str) -> dict[str, Any]:
    both = [await find_rollout(store, first), await find_rollout(store, second)]
    paths = [_path(rollout) for rollout in both]
    parted = first_difference(*paths)
    shown: list[dict[str, Any]] = []
    for rollout, path in zip(both, paths, strict=True):
        prices, config = await find_terms(store, rollout)
        costs = call_costs(rollout, prices)
        shown.append(
            {
                "rollout": rollout,
                "alike": steps.show(path[: min(parted, STEPS)], 0, costs),
                "steps": steps.show(path[parted : parted + STEPS], parted, costs),
                "total": len(path),
                "rest": max(0, len(path) - parted - STEPS),
                "currency": config.get("currency", ""),
            }
        )
    return {"sides": shown, "parted": parted, "same": parted == len(paths[0]) == len(paths[1])}


def _path(rollout: Rollout) -> Sequence[Node]:
    branches = rollout.captured.branches
    return branches[0].nodes if branches else ()


def first_difference(first: Sequence[Node], second: Sequence[Node]) -> int:
    """How many messages both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a.message.digest != b.message.digest), min(len(first), len(second)))
