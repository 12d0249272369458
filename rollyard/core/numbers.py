"""Numbers as callers give them: one below its least value is refused by the name of its field, and 0 is a value."""

from __future__ import annotations

from rollyard.core.errors import ConfigError

LARGEST = 2**63 - 1  # that a store keeps


def whole_number(value: object) -> int | None:
    """What a server wrote as a number or in digits; None where it is no count, or more than can be kept."""
    if isinstance(value, str) and value.isdecimal() and len(value) < len(str(LARGEST)) + 1:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def count(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_least(least: float, **values: float | None) -> None:
    """None is unset. Each number is at least this large; a truth value is no number, nor is NaN."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not value >= least):
            raise ConfigError(f"{name} must be at least {least:g}, got {value!r}")
