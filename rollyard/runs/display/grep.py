"""What `rollyard grep` prints: a line for each place, or the rollouts alone."""

from __future__ import annotations

import re
import sys

import msgspec

from rollyard.core.errors import UnknownName
from rollyard.store import Store
from rollyard.store.listing import printable, run_id
from rollyard.store.search import Found, search
from rollyard.store.texts import PLACES

_BEFORE, _LINE = 60, 200  # characters of a line kept before what was found, and in all


async def print_found(
    where: str,
    pattern: re.Pattern[str],
    words: list[str],
    run: str,
    places: tuple[str, ...],
    limit: int,
    names: bool,
    json: bool,
) -> int:
    """How many were printed. `words` are those that each line found must have."""
    for place in places:
        if place not in PLACES:
            raise UnknownName("place", place, list(PLACES))
    count, named = 0, ""
    async with Store.open(where, create=False) as store:
        chosen = await run_id(store, run) if run else None
        async for found in search(store, pattern, run_id=chosen, words=words):
            if places and found.place not in places:
                continue
            if names and found.rollout_id == named:
                continue
            named = found.rollout_id
            print(found.rollout_id if names else _json(found) if json else _text(found, pattern))
            count += 1
            if count == limit:
                print(f"the first {limit} are shown; --limit for more", file=sys.stderr)
                break
    return count


def _json(found: Found) -> str:
    return msgspec.json.encode(found).decode()


def _text(found: Found, pattern: re.Pattern[str]) -> str:
    match = pattern.search(found.line)
    start = max(0, (match.start() if match else 0) - _BEFORE)
    line = found.line[start : start + _LINE].strip()
    line = f"{'...' if start else ''}{line}{'...' if len(found.line) > start + _LINE else ''}"
    who = f"{found.agent} / {found.policy}" if found.policy else found.agent
    call = "" if found.call is None else f" of call {found.call}"
    return printable(f"{found.rollout_id}  {found.task_id}  {who}  {found.place}{call}: {line}")
