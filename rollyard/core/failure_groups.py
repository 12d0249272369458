"""Failures put together by what they say: fifty rollouts that broke alike are one line with a count.

Two messages are alike when they differ only in what names one occasion: ids, digests, numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from rollyard.core.errors import Boundary

MOST = 20  # groups that are shown
_OCCASION = re.compile(r"\b(?=[\w-]*\d)[\w-]{8,}\b|\d+(?:\.\d+)?")


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is that of the first one."""

    boundary: Boundary
    cause: str
    message: str
    count: int


def alike(message: str) -> str:
    """The message without what names one occasion."""
    return _OCCASION.sub("#", message)


def group_failures(found: Iterable[FailureGroup]) -> tuple[FailureGroup, ...]:
    """Join the groups that are alike; the most frequent comes first."""
    groups: dict[tuple[str, str, str], FailureGroup] = {}
    for one in found:
        key = (one.boundary, one.cause, alike(one.message))
        first = groups.get(key)
        groups[key] = one if first is None else msgspec.structs.replace(first, count=first.count + one.count)
    return tuple(sorted(groups.values(), key=lambda group: -group.count)[:MOST])
