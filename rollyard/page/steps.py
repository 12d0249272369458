"""Messages as a person reads them: a command as a terminal shows it, a change as a patch, anything else as JSON.

Every text is cut to what a page can hold; the whole of it is one click away, as raw JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from rollyard.core.message import Message
from rollyard.core.node import Node

LONGEST = 12_000  # characters of one text
DIFF_LINES = 1500
_FOLDED = 3000
_FILES = ("--- ", "+++ ", "diff ", "index ")
_KINDS = {"+": "add", "-": "del", "@": "hunk"}


def show(nodes: Sequence[Node], first: int) -> list[dict[str, Any]]:
    return [_step(number, node) for number, node in enumerate(nodes, first)]


def _step(number: int, node: Node) -> dict[str, Any]:
    message: Message = node.message
    return {
        "number": number,
        "role": message.role,
        "text": cut(message.text),
        "size": len(message.text),
        "thinking": cut(message.thinking),
        "calls": [{"name": call.name, **_arguments(call.arguments)} for call in message.tool_calls],
        "results": [
            {"text": cut("".join(getattr(part, "text", "") for part in result.parts)), "error": result.is_error}
            for result in message.tool_results
        ],
        "sampled": node.sampled,
        "call_id": node.call_id,
        "tokens": len(node.ids) if node.ids else None,
        "folded": message.role == "system" or len(message.text) > _FOLDED,
    }


def _arguments(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"kind": "json", "text": cut(text)}
    if isinstance(fields, dict):
        values = cast("dict[str, Any]", fields)
        for name in ("command", "cmd", "script"):
            if name in values:
                value = values[name]
                command = value if isinstance(value, str) else " ".join(map(str, cast("list[Any]", value)))
                return {"kind": "terminal", "text": cut(command)}
        if "old_string" in values and "new_string" in values:
            lines = [f"-{line}" for line in str(values["old_string"]).splitlines()]
            lines += [f"+{line}" for line in str(values["new_string"]).splitlines()]
            return {"kind": "diff", "text": str(values.get("file_path", "")), "lines": diff_lines("\n".join(lines))}
    return {"kind": "json", "text": cut(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())}


def diff_lines(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    found = [(_kind(line), line[:2000]) for line in lines[:DIFF_LINES]]
    if len(lines) > DIFF_LINES:
        found.append(("hunk", f"… {len(lines) - DIFF_LINES} more lines"))
    return found


def _kind(line: str) -> str:
    return "hunk" if line.startswith(_FILES) else _KINDS.get(line[:1], "same")


def cut(text: str) -> str:
    """The head and the tail of a text that is too long to show."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
