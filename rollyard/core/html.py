"""Small pieces of HTML for notebooks, in which whatever was said stays text.

All words go through `escape`: agents and programs wrote many of them. There is no script and nothing to load, and a notebook
is told not to read formulas into it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.core.rollout import Rollout, Turn

LONGEST = 4000  # characters of one text that are shown
MOST = 200  # rows and turns that are shown
_CELL = "text-align:left;padding:2px 10px 2px 0;vertical-align:top"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0 8px 0;max-height:24em;overflow:auto"


def escape(value: Any) -> str:
    """Any value as text of at most `LONGEST` characters."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
    return html.escape(encodable(text), quote=True)


def encodable(text: str) -> str:
    """Text that can be sent as UTF-8: half of a character is written as its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Values as text, the first `MOST` rows of them."""
    shown = list(rows)
    drawn = [_row("th", head)] if head else []
    drawn += [_row("td", row) for row in shown[:MOST]]
    more = f"<div>{len(shown) - MOST} more</div>" if len(shown) > MOST else ""
    return f"<table>{''.join(drawn)}</table>{more}"


def _row(tag: str, values: Sequence[Any]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_CELL}">{escape(value)}</{tag}>' for value in values) + "</tr>"


def line(text: Any) -> str:
    return f"<div><b>{escape(text)}</b></div>"


def pre(text: Any) -> str:
    return f'<pre style="{_TEXT}">{escape(text)}</pre>'


def fold(title: Any, *inside: str) -> str:
    """Pieces of HTML under a title that opens and closes."""
    return f"<details><summary>{escape(title)}</summary>{''.join(inside)}</details>"


def bar(done: int, total: int) -> str:
    return f'<progress value="{int(done)}" max="{max(1, int(total))}"></progress>'


def block(*pieces: str) -> str:
    """The whole that a notebook shows."""
    return f'<div class="rollyard tex2jax_ignore mathjax_ignore">{"".join(pieces)}</div>'


def draw_rollout(rollout: Rollout) -> str:
    facts: list[tuple[str, Any]] = [
        ("reward", rollout.reward),
        ("calls", rollout.calls),
        ("tokens in", rollout.usage.get("prompt_tokens")),
        ("tokens out", rollout.usage.get("completion_tokens")),
        ("seconds", round(rollout.wall_s, 1)),
    ]
    if rollout.verdict is not None:
        facts += [("verdict", rollout.verdict.status), *rollout.verdict.parts.items(), *rollout.verdict.checks.items()]
    if (failure := rollout.failure) is not None:
        facts += [("failed at", failure.boundary), ("cause", failure.cause), ("message", failure.message)]
        facts += [("hint", failure.hint)] if failure.hint else []
    head = f"{rollout.task.id} #{rollout.attempt}  {rollout.agent}  {rollout.status}"
    pieces = [line(head), f"<div>{escape(rollout.id)}</div>", table((), facts), *map(draw_turn, rollout.turns[:MOST])]
    if rollout.diff:
        pieces.append(fold("diff", pre(rollout.diff)))
    if rollout.log_tail:
        pieces.append(fold("end of the agent's log", pre(rollout.log_tail)))
    return block(*pieces)


def draw_turn(turn: Turn) -> str:
    """What the model said in one call, and the tools that it asked for."""
    said = turn.response
    pieces = [fold("reasoning", pre(said["reasoning"]))] if said.get("reasoning") else []
    pieces += [pre(said["content"])] if said.get("content") else []
    pieces += [pre(f"{call['name']} {call['arguments']}") for call in said.get("tool_calls", ())]
    words = [turn.kind, turn.finish_reason or ""]
    if turn.completion_ids is not None:
        words.append(f"{len(turn.completion_ids)} tokens")
    return fold("  ".join(word for word in words if word), *pieces)
