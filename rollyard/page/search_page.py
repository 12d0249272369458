"""The page of a search: rollouts whose transcripts, tool calls, logs or verdicts have the words, with the lines that show it."""

from __future__ import annotations

from typing import Any

import msgspec
from markupsafe import Markup, escape

from rollyard.page.markup import visible
from rollyard.page.query import PageQuery
from rollyard.store import Store
from rollyard.store.search import index_missing, matching_line
from rollyard.store.texts import FoundText, phrases

_TEXTS = 300  # that a page reads
_LINES = 4  # that it shows of a rollout
_AT_ONCE = 100  # rollouts of an older store that one search puts into the index
_BEFORE, _LINE = 80, 240


class FoundRollout(msgspec.Struct, kw_only=True):
    row: FoundText
    lines: list[tuple[str, int | None, Markup]]  # place, call, text
    more: int = 0


async def find(store: Store, parameters: PageQuery) -> dict[str, Any]:
    query, run = parameters.text("q") or "", parameters.text("run")
    left = await index_missing(store, limit=_AT_ONCE) if query else 0
    texts = await store.find_texts(query, run_id=run, limit=_TEXTS) if query else []
    found: dict[str, FoundRollout] = {}
    for one in texts:
        shown = found.setdefault(one.rollout_id, FoundRollout(row=one, lines=[]))
        if len(shown.lines) < _LINES:
            shown.lines.append((one.place, one.call, mark(matching_line(one.body, query), query)))
        else:
            shown.more += 1
    return {"q": query, "run": run, "found": list(found.values()), "left": left, "full": len(texts) == _TEXTS}


def mark(line: str, query: str) -> Markup:
    """The words that were looked for stand out; of a long line, what is around the first of them."""
    wanted = [phrase.lower() for phrase in phrases(query)]
    low = line.lower()
    first = min((at for at in map(low.find, wanted) if at >= 0), default=0)
    start = max(0, first - _BEFORE)
    line, low = line[start : start + _LINE], low[start : start + _LINE]
    if len(low) != len(line):  # a letter whose small form is longer
        return escape(visible(line))
    inside = bytearray(len(line))
    for phrase in wanted:
        at = low.find(phrase)
        while at >= 0:
            inside[at : at + len(phrase)] = b"\1" * len(phrase)
            at = low.find(phrase, at + len(phrase))
    out, at = escape("…" if start else ""), 0
    while at < len(line):
        end = at
        while end < len(line) and inside[end] == inside[at]:
            end += 1
        piece = visible(line[at:end])
        out += Markup("<mark>{}</mark>").format(piece) if inside[at] else escape(piece)
        at = end
    return out
