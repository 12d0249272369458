"""Partial reward: how much of a failed task was done, from the lists that a verifier prints of what held and what did not.

    >>> ERROR_ACCUMULATOR >>> ["the ticket is open"] <<< ERROR_ACCUMULATOR <<<
    >>> SUCCESS_ACCUMULATOR >>> ["nothing else changed"] <<< SUCCESS_ACCUMULATOR <<<

A block holds a list, or lines `App NAME: N` with a count each, or one item a line. It ends at its closing mark, at the next block
or at the end.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON

_BLOCK = re.compile(
    r">>>\s*(ERROR|SUCCESS)_ACCUMULATOR\s*>>>(.*?)(?=<<<\s*\1_ACCUMULATOR|>>>\s*\w+_ACCUMULATOR|\Z)", re.DOTALL
)
_COUNT = re.compile(r"^\s*App\s+.+?:\s*(\d+)\s*$", re.MULTILINE)
_LONGEST = 200_000


def fraction(stdout: str) -> float:
    """Successes over everything that was looked at; 0.0 where nothing was."""
    counts = {"ERROR": 0, "SUCCESS": 0}
    for kind, block in _BLOCK.findall(stdout[-_LONGEST:]):
        counts[kind] += _items(block.strip())
    whole = counts["ERROR"] + counts["SUCCESS"]
    return counts["SUCCESS"] / whole if whole else 0.0


def partial(score: float | None, stdout: str) -> float | None:
    """A pass stays what it is, and so does no score; only a failed run gets the fraction."""
    return fraction(stdout) if score is not None and score <= 0.0 else score


def _items(block: str) -> int:
    listed = _parse_list(block)
    if listed is not None:
        return len(listed)
    if counted := _COUNT.findall(block):
        return sum(map(int, counted))
    return sum(bool(line.strip()) for line in block.splitlines())


def _parse_list(block: str) -> list[Any] | tuple[Any, ...] | None:
    if not block.startswith(("[", "(")):
        return None
    try:
        found = msgspec.json.decode(block)
    except BAD_JSON:
        try:
            found = ast.literal_eval(block)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, (list, tuple)) else None
