"""Messages as Inspect has them, each kept once for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.html import encodable
from rollyard.core.message import Image, Message, Opaque, Text, Thinking, ToolCall, ToolResult
from rollyard.core.node import Node
from rollyard.trajectory.trajectory import Trajectory


class MessagePool:
    """`messages` of all nodes in order; `results` are what tools answered, by the id of their call."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.messages: list[dict[str, Any]] = []
        self.results: dict[str, ToolResult] = {}
        self._nodes = trajectory.nodes
        self._places: list[tuple[int, int]] = []
        self._prefix = trajectory.rollout_id
        for node in self._nodes:
            start = len(self.messages)
            self.messages += _messages(node, self._prefix)
            self._places.append((start, len(self.messages)))
            self.results.update((result.call_id, result) for result in node.message.tool_results)

    def ranges(self, leaf: int | None) -> list[tuple[int, int]]:
        """Where the messages from the root to a node are, neighbours put together."""
        found: list[tuple[int, int]] = []
        for start, end in self._path(leaf):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            elif end > start:
                found.append((start, end))
        return found

    def of_leaf(self, leaf: int | None) -> list[dict[str, Any]]:
        return [message for start, end in self.ranges(leaf) for message in self.messages[start:end]]

    def answer(self, node: Node) -> dict[str, Any]:
        return self.messages[self._places[node.id][0]]

    def _path(self, leaf: int | None) -> list[tuple[int, int]]:
        path: list[tuple[int, int]] = []
        while leaf is not None:
            path.append(self._places[leaf])
            leaf = self._nodes[leaf].parent
        return path[::-1]


def _messages(node: Node, prefix: str) -> list[dict[str, Any]]:
    """A message that carries several tool results is several here."""
    message, name = node.message, f"{prefix}-{node.id}"
    out = [_tool_message(result, f"{name}-{number}") for number, result in enumerate(message.tool_results)]
    rest = tuple(part for part in message.parts if not isinstance(part, ToolResult | ToolCall))
    if message.role == "assistant":
        return [{**_assistant(message, node.sampled, rest), "id": name}, *out]
    if rest or not out:
        role = "user" if message.role == "tool" else message.role
        out.append({"id": name, "role": role, "content": content_of(rest)})
    return out


def _assistant(message: Message, sampled: bool, parts: Sequence[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": content_of(parts)}
    if sampled:
        said["source"] = "generate"
    if message.tool_calls:
        said["tool_calls"] = [tool_call(call) for call in message.tool_calls]
    return said


def _tool_message(result: ToolResult, name: str) -> dict[str, Any]:
    content = content_of(result.parts)
    message: dict[str, Any] = {"id": name, "role": "tool", "tool_call_id": result.call_id, "content": content}
    if result.name:
        message["function"] = result.name
    if result.is_error:
        words = "".join(part.text for part in result.parts if isinstance(part, Text))
        message["error"] = {"type": "unknown", "message": encodable(words)}
    return message


def tool_call(call: ToolCall) -> dict[str, Any]:
    """Arguments that are no JSON object become an entry that could not be read."""
    name = f"{call.namespace}.{call.name}" if call.namespace else call.name
    message: dict[str, Any] = {"id": call.id, "function": name, "arguments": {}, "type": "function"}
    try:
        message["arguments"] = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        message["parse_error"] = encodable(f"no JSON object: {call.arguments}")
    return message


def content_of(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Text alone as text; otherwise a list of parts."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            out.append({"type": "text", "text": encodable(part.text)})
        elif isinstance(part, Thinking):
            out.append({"type": "reasoning", "reasoning": encodable(part.text), "redacted": part.redacted})
        elif isinstance(part, Image):
            out.append({"type": "image", "image": part.url or f"data:{part.media_type};base64,{part.data or ''}"})
        elif isinstance(part, Opaque):
            out.append({"type": "text", "text": encodable(part.json)})
    if all(part["type"] == "text" for part in out):
        return "".join(part["text"] for part in out)
    return out
