"""What `rollyard grep` prints: a line for each place, or the rollouts alone."""

from __future__ import annotations

import os
import re
import sys

import msgspec

from rollyard.core.errors import UnknownName
from rollyard.core.ids import short_id
from rollyard.core.printable import printable
from rollyard.runs.display.paint import BOLD, RED, paint
from rollyard.store import Store
from rollyard.store.listing import run_id
from rollyard.store.search import Found, SoughtText, search
from rollyard.store.texts import PLACES

_BEFORE, _LINE = 60, 200  # characters of a line kept before what was found, and in all
_LEAST = 20  # on a terminal, however narrow


async def print_found(
    where: str,
    sought: SoughtText,
    run: str,
    places: tuple[str, ...],
    limit: int,
    names: bool,
    json: bool,
) -> int:
    """How many were printed."""
    for place in places:
        if place not in PLACES:
            raise UnknownName("place", place, list(PLACES))
    count, last = 0, ""
    async with Store.open(where, create=False) as store:
        chosen = await run_id(store, run) if run else None
        async for found in search(store, sought, run_id=chosen):
            if places and found.place not in places:
                continue
            if names and found.rollout_id == last:
                continue
            print(found.rollout_id if names else _json(found) if json else _text(found, sought.pattern, last))
            last = found.rollout_id
            count += 1
            if count == limit:
                print(f"the first {limit} are shown; --limit for more", file=sys.stderr)
                break
    return count


def _json(found: Found) -> str:
    return msgspec.json.encode(found).decode()


def _text(found: Found, pattern: re.Pattern[str], last: str) -> str:
    """A line with all that names it; on a terminal a line that fits, and above the first of a rollout what names that."""
    place = found.place if found.call is None else f"{found.place} of call {found.call}"
    who = f"{found.agent} / {found.policy}" if found.policy else found.agent
    if not sys.stdout.isatty():
        return printable(f"{found.rollout_id}  {found.task_id}  {who}  {place}: {_shorten(found.line, pattern, _LINE)}")
    head = paint(printable(f"{short_id(found.rollout_id)}  {found.task_id}  {who}"), BOLD) + "\n"
    room = (os.get_terminal_size(sys.stdout.fileno()).columns or 80) - len(f"  {place}: ......")
    line = printable(_shorten(found.line, pattern, max(room, _LEAST)))
    line = pattern.sub(lambda match: paint(match[0], RED) if match[0] else "", line)
    return f"{'' if found.rollout_id == last else chr(10) + head if last else head}  {place}: {line}"


def _shorten(line: str, pattern: re.Pattern[str], room: int) -> str:
    match = pattern.search(line)
    start = 0 if match is None else max(0, min(match.start() - min(_BEFORE, room // 3), len(line) - room))
    return f"{'...' if start else ''}{line[start : start + room].strip()}{'...' if len(line) > start + room else ''}"
