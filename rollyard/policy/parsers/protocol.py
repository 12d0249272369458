"""What a parser is: a family's way to write reasoning and tool calls as text.

`parse` never loses text: what is not a well-formed call stays text, and a call whose arguments are not JSON is kept as it
was written, since an agent's own error is the better teacher. `format` is the inverse for messages whose text is canonical.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollyard.core.message import Message, Part, Text, Thinking, ToolCall, ToolSpec


class ReplyParser(Protocol):
    name: str
    think: tuple[str, str]  # what opens and closes reasoning; empty where the family has none

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message: ...
    def format(self, message: Message) -> str: ...


def assemble(thinking: str | None, text: str, calls: Sequence[tuple[str, str]]) -> Message:
    """A message of what was found; `calls` are (name, JSON arguments). `stamp_call_ids` makes their ids unique."""
    parts: list[Part] = []
    if thinking:
        parts.append(Thinking(thinking))
    if text:
        parts.append(Text(text))
    parts.extend(ToolCall(f"call_{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    return Message("assistant", tuple(parts))


def stamp_call_ids(message: Message, seed: str) -> Message:
    """The message with tool-call ids that no other turn has; the same seed gives the same ids."""
    if not message.tool_calls:
        return message
    parts: list[Part] = []
    for n, part in enumerate(message.parts):
        if isinstance(part, ToolCall):
            unique = hashlib.blake2b(f"{seed}:{n}".encode(), digest_size=12).hexdigest()
            part = msgspec.structs.replace(part, id=f"call_{unique}")
        parts.append(part)
    return Message("assistant", tuple(parts), name=message.name)
