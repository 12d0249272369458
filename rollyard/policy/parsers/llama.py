"""Llama 3: a call is the whole answer, `{"name": ..., "parameters": {...}}`, several joined by `;`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from rollyard.core.message import Message, ToolSpec
from rollyard.policy.parsers.protocol import assemble

TAG = "<|python_tag|>"


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()


class Llama:
    name: str = "llama"
    think: tuple[str, str] = ("", "")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        said, tag, after = text.partition(TAG)
        body = after if tag else text
        calls = read_calls(body)
        if calls is None:
            return assemble(None, text, ())
        return assemble(None, said.rstrip() if tag else "", calls)

    def format(self, message: Message) -> str:
        written = [
            f'{{"name": {msgspec.json.encode(call.name).decode()}, "parameters": {call.arguments or "{}"}}}'
            for call in message.tool_calls
        ]
        if not written:
            return message.text
        return (f"{message.text}{TAG}" if message.text else "") + "; ".join(written)


def read_calls(body: str) -> list[tuple[str, str]] | None:
    """Objects from end to end, or nothing: text around them means that it was text."""
    decoder, at, found = json.JSONDecoder(), 0, list[tuple[str, str]]()
    body = body.strip()
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
            call = msgspec.json.decode(body[at:end], type=_Call)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return None
        arguments = bytes(call.parameters) or bytes(call.arguments) or b"{}"
        found.append((call.name, arguments.decode()))
        at = end
        while at < len(body) and body[at] in "; \n":
            at += 1
    return found or None


LLAMA = Llama()
