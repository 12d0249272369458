"""How values are written on the page: times, durations, rewards, counts, money. All but a time return plain text; escaping is
the template's work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from rollyard.core.ids import short_id
from rollyard.runs.report import spending

UNKNOWN = "\u2013"


def when(at: float | None) -> str:
    """A moment that the page's script shows in the reader's own time zone; in UTC without it."""
    if not at:
        return UNKNOWN
    return Markup('<time datetime="{}">{}</time>').format(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)), moment(at)
    )


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:.0f} days"


def reward(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def count(value: float | None) -> str:
    """Thousands apart; from a million on, in millions."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}".replace(",", "\u202f") if value < 1_000_000 else f"{value / 1e6:.2f} M"


def money(value: float | None, currency: str = "") -> str:
    return UNKNOWN if value is None else spending.money(value, currency)


def size(value: int) -> str:
    if value < 1000:
        return f"{value} B"
    return f"{value / 1000:.1f} kB" if value < 1_000_000 else f"{value / 1e6:.1f} MB"


def reward_class(value: float | None) -> str:
    if value is None:
        return "unscored"
    return "good" if value >= 1 else "bad" if value <= 0 else "part"


def heat_class(value: float | None) -> str:
    """Eleven steps from 0 to 1, as a class of the style sheet."""
    return "g-none" if value is None else f"g{max(0, min(10, round(value * 10)))}"


FILTERS: dict[str, Callable[..., Any]] = {
    "when": when,
    "moment": moment,
    "seconds": seconds,
    "reward": reward,
    "count": count,
    "money": money,
    "size": size,
    "short": short_id,
    "reward_class": reward_class,
    "heat_class": heat_class,
}
