"""Named numbers to a reward, by one rule: `reward` where there is one of that name, the only number where there is one, else
the mean of all. Only finite numbers count; anything else is a verifier that failed, not a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.rollout import Verdict


def finite(value: Any) -> float:
    """A reward as a float. Booleans, strings, NaN and infinities are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"a reward is a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a reward is a finite number, got {repr(value)[:80]}")
    return number


def main_reward(parts: Mapping[str, float]) -> float:
    if "reward" in parts:
        return parts["reward"]
    return math.fsum(parts.values()) / len(parts)


def from_parts(found: Mapping[str, Any]) -> Verdict:
    try:
        parts = {str(name): finite(value) for name, value in found.items()}
    except ValueError as error:
        return Verdict(status="failed", error=str(error))
    if not parts:
        return Verdict(status="failed", error="the verifier named no reward")
    return Verdict(reward=main_reward(parts), parts=parts)


def parse_json(data: bytes) -> Verdict:
    """`reward.json`: a number, or a flat object of numbers."""
    if not data.strip():
        return Verdict(status="failed", error="reward.json is empty")
    try:
        found = msgspec.json.decode(data)
    except BAD_JSON as error:
        return Verdict(status="failed", error=f"reward.json: {error}")
    if isinstance(found, Mapping):
        return from_parts(found)
    return from_parts({"reward": found})


def parse_text(data: bytes) -> Verdict:
    """`reward.txt`: one number."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        return Verdict(status="failed", error="reward.txt is empty")
    try:
        return from_parts({"reward": float(text)})
    except ValueError:
        return Verdict(status="failed", error=f"reward.txt holds no number: {text[:80]!r}")
