"""Families that write `<think>...</think>`, then text, then calls between two tags.

The families differ in the tags and in what stands between them (`Body`); the walk over the text is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollyard.core.message import Message, ToolCall, ToolSpec
from rollyard.policy.parsers.protocol import assemble

# what stands between the tags -> (name, JSON arguments), or None when it is not a call
Body = Callable[[str, Sequence[ToolSpec]], tuple[str, str] | None]


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    open: str
    close: str
    section: tuple[str, str] | None = None  # tags around all calls
    think: tuple[str, str] = ("<think>", "</think>")


class Tagged:
    """A `Parser` made of tags, a body reader and a body writer."""

    def __init__(self, name: str, tags: Tags, read: Body, write: Callable[[ToolCall], str]) -> None:
        self.name = name
        self.think = tags.think
        self._tags = tags
        self._read = read
        self._write = write
        self._span = re.compile(f"{re.escape(tags.open)}(.*?)(?:{re.escape(tags.close)}|\\Z)", re.DOTALL)

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        thinking, rest = split_thinking(text, self._tags.think)
        if self._tags.section is not None:
            for tag in self._tags.section:
                rest = rest.replace(tag, "")
        calls: list[tuple[str, str]] = []
        kept: list[str] = []
        at = 0
        for found in self._span.finditer(rest):
            call = self._read(found.group(1), tools)
            if call is None:
                continue
            calls.append(call)
            kept.append(rest[at : found.start()])
            at = found.end()
        kept.append(rest[at:])
        said = "".join(kept) if not calls else "".join(piece.rstrip() for piece in kept)
        return assemble(thinking, said, calls)

    def format(self, message: Message) -> str:
        tags = self._tags
        out: list[str] = []
        if message.thinking:
            out.append(f"{tags.think[0]}\n{message.thinking}\n{tags.think[1]}\n\n")
        out.append(message.text)
        written = [f"{tags.open}{self._write(call)}{tags.close}" for call in message.tool_calls]
        if written:
            if message.text:
                out.append("\n")
            out.append(tags.section[0] if tags.section else "")
            out.append(("" if tags.section else "\n").join(written))
            out.append(tags.section[1] if tags.section else "")
        return "".join(out)


def split_thinking(text: str, tags: tuple[str, str]) -> tuple[str | None, str]:
    """(reasoning, the rest). A generation prompt may have opened the reasoning already; a cut one never closes it."""
    opened, closed = tags
    start = text.lstrip()
    if closed in text:
        before, _, after = text.partition(closed)
        return before.replace(opened, "", 1).strip("\n"), after.lstrip("\n")
    if start.startswith(opened):
        return start.removeprefix(opened).lstrip("\n"), ""
    return None, text


class _Hermes(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_hermes(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """`{"name": ..., "arguments": {...}}`; the arguments keep the spelling the model chose."""
    try:
        call = msgspec.json.decode(body.strip().encode("utf-8", "surrogatepass"), type=_Hermes)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return call.name, unwrap_arguments(bytes(call.arguments).decode())


def unwrap_arguments(arguments: str) -> str:
    """Arguments that were written as a JSON string hold the object inside it."""
    if not arguments.startswith('"'):
        return arguments
    inner: Any = msgspec.json.decode(arguments)
    return inner if isinstance(inner, str) and inner.lstrip().startswith("{") else arguments


def write_hermes(call: ToolCall) -> str:
    name = msgspec.json.encode(call.name).decode()
    return f'\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n'


HERMES = Tagged("hermes", Tags(open="<tool_call>", close="</tool_call>"), read_hermes, write_hermes)
