"""Messages as a person reads them: Markdown as text, a command as a terminal shows it, a change as a patch, the rest as JSON.

Each step says what it took: tokens, seconds and money of a model call, exit code and seconds of a tool. Every text is cut to
what a page can hold; the whole of it is one click away, as raw JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from markupsafe import Markup

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.call import CallRecord
from rollyard.core.message import Message, Text, ToolResult
from rollyard.core.node import Node
from rollyard.page import markup
from rollyard.runs.report.spending import Price

LONGEST = 12_000  # characters of one text
DIFF_LINES = 1500
_FOLDED = 3000
_FILES = ("--- ", "+++ ", "diff ", "index ")
_KINDS = {"+": "add", "-": "del", "@": "hunk"}
_PATCH = re.compile(r"^--- .*\n\+\+\+ .*\n@@ ", re.MULTILINE)
_ENDING = (
    re.compile(  # as agents word it: `exit code 1`, `Exit code: 1`, `exited with code 1`, `<returncode>1</returncode>`
        r"^\W*(?:process |command )?(?:exit(?:ed)?(?: with)?(?: code| status)|returncode)\W{1,3}(-?\d{1,3})\b",
        re.IGNORECASE | re.MULTILINE,
    )
)


class CallCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The calls behind the steps, by id, and the price of their tokens where one is known."""

    records: Mapping[str, CallRecord] = {}
    price: Price | None = None


def show(nodes: Sequence[Node], first: int, costs: CallCosts) -> list[dict[str, Any]]:
    """`nodes` from number `first` on, of one branch."""
    waits = _tool_times(nodes, costs.records)
    return [_step(number, node, costs, waits.get(node.id)) for number, node in enumerate(nodes, first)]


def _tool_times(nodes: Sequence[Node], records: Mapping[str, CallRecord]) -> dict[int, float]:
    """Seconds between an answer with tool calls and the next call, on the first result after the answer."""
    found: dict[int, float] = {}
    ended: float | None = None
    first: int | None = None
    for node in nodes:
        record = records.get(node.call_id or "") if node.sampled else None
        if record is not None:
            if first is not None and ended is not None:
                found[first] = max(0.0, record.received_at - ended)
            ended, first = record.finished_at, None
        elif node.message.tool_results and first is None:
            first = node.id
    return found


def _step(number: int, node: Node, costs: CallCosts, waited: float | None) -> dict[str, Any]:
    message: Message = node.message
    folded = message.role == "system" or len(message.text) > _FOLDED
    return {
        "number": number,
        "role": message.role,
        "text": markup.markdown(shorten(message.text)) if message.text.strip() else "",
        "size": len(message.text),
        "thinking": markup.markdown(shorten(message.thinking)) if message.thinking.strip() else "",
        "calls": [{"name": call.name, **_arguments(call.arguments)} for call in message.tool_calls],
        "results": [_result(result) for result in message.tool_results],
        "sampled": node.sampled,
        "call_id": node.call_id,
        "tokens": len(node.ids) if node.ids else None,
        "took": _costs_of(costs.records.get(node.call_id or ""), costs.price) if node.sampled else None,
        "waited": waited,
        "folded": folded,
    }


def _costs_of(record: CallRecord | None, price: Price | None) -> dict[str, Any] | None:
    if record is None:
        return None
    used = record.usage
    known = used.prompt_tokens is not None or used.completion_tokens is not None
    return {
        "prompt": used.prompt_tokens,
        "cached": used.cached_tokens,
        "completion": used.completion_tokens,
        "seconds": None if record.finished_at is None else max(0.0, record.finished_at - record.received_at),
        "cost": None if price is None or not known else price.of(used),
        "finish": record.finish,
        "kind": record.kind,
        "model": record.model_served or record.model_requested,
    }


def _result(result: ToolResult) -> dict[str, Any]:
    text = shorten("".join(part.text for part in result.parts if isinstance(part, Text)))
    ending = exit_code(text)
    kind = "diff" if _PATCH.search(text) else "terminal"
    return {
        "kind": kind,
        "text": markup.terminal(text),
        "lines": diff_lines(text) if kind == "diff" else (),
        "exit": ending,
        "error": result.is_error or bool(ending),
        "name": result.name,
    }


def exit_code(text: str) -> int | None:
    """What a tool's output says about its program's end, in its first or its last lines; None where it says nothing."""
    lines = text.strip().splitlines()
    found = _ENDING.search("\n".join(lines[:2] + lines[2:][-2:]))
    return int(found[1]) if found else None


def _arguments(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except BAD_JSON:
        return {"kind": "code", "where": "", "text": markup.visible(shorten(text))}
    if isinstance(fields, dict):
        values = cast("dict[str, Any]", fields)
        where = next((str(values[name]) for name in ("file_path", "path", "filename") if name in values), "")
        for name in ("command", "cmd", "script"):
            if name in values:
                value = values[name]
                command = value if isinstance(value, str) else " ".join(map(str, cast("list[Any]", value)))
                return {"kind": "terminal", "where": "", "text": markup.visible(shorten(command))}
        if "old_string" in values and "new_string" in values:
            lines = [f"-{line}" for line in str(values["old_string"]).splitlines()]
            lines += [f"+{line}" for line in str(values["new_string"]).splitlines()]
            return {"kind": "diff", "where": where, "lines": diff_lines("\n".join(lines))}
        content = values.get("content")
        if where and isinstance(content, str):
            return {"kind": "code", "where": where, "text": markup.code(shorten(content), name=where)}
    return {"kind": "code", "where": "", "text": json_code(text)}


def json_code(text: str) -> Markup:
    """JSON with a line for each member, in colour; what is none, as it is."""
    try:
        text = msgspec.json.format(text, indent=2)
    except BAD_JSON:
        return markup.code(shorten(text))
    return markup.code(shorten(text), language="json")


def diff_lines(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    found = [(_kind(line), markup.visible(line[:2000])) for line in lines[:DIFF_LINES]]
    if len(lines) > DIFF_LINES:
        found.append(("hunk", f"… {len(lines) - DIFF_LINES} more lines"))
    return found


def _kind(line: str) -> str:
    return "hunk" if line.startswith(_FILES) else _KINDS.get(line[:1], "same")


def shorten(text: str) -> str:
    """The head and the tail of a text that is too long to show."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
