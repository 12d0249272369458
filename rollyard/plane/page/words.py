"""How values are written on the page: times, durations, rewards. All return plain text; escaping is the template's work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def when(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at else "-"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def reward(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def short(text: str, size: int = 12) -> str:
    """The end of an id, which is what differs."""
    return text if len(text) <= size + 1 else f"…{text[-size:]}"


def reward_class(value: float | None) -> str:
    if value is None:
        return "unscored"
    return "good" if value >= 1 else "bad" if value <= 0 else "part"


FILTERS: dict[str, Callable[..., Any]] = {
    "when": when,
    "seconds": seconds,
    "reward": reward,
    "short": short,
    "reward_class": reward_class,
}
