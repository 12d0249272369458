"""gpt-oss: messages on channels. `analysis` is reasoning, `final` is the answer, `commentary to=functions.NAME` a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollyard.core.message import Message, ToolSpec
from rollyard.policy.parsers.protocol import assemble

_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<early>\s*to=\S+?)?<\|channel\|>(?P<channel>\w+)(?P<header>[^<]*)"
    r"(?:<\|constrain\|>\w*)?\s*<\|message\|>(?P<body>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|\Z)"
    r"(?:<\|end\|>|<\|call\|>|<\|return\|>)?",
    re.DOTALL,
)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class Harmony:
    name: str = "harmony"
    think: tuple[str, str] = ("<|channel|>analysis<|message|>", "<|end|>")

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        thinking: list[str] = []
        said: list[str] = []
        calls: list[tuple[str, str]] = []
        found = list(_MESSAGE.finditer(text))
        if not found:
            return assemble(None, text, ())
        for message in found:
            to = _TO.search(f"{message['early'] or ''} {message['header']}")
            if to is not None:
                calls.append((to.group(1), message["body"].strip() or "{}"))
            elif message["channel"] == "analysis":
                thinking.append(message["body"])
            else:
                said.append(message["body"])
        return assemble("\n".join(thinking), "\n".join(said), calls)

    def format(self, message: Message) -> str:
        pieces: list[str] = []
        if message.thinking:
            pieces.append(f"<|channel|>analysis<|message|>{message.thinking}")
        if message.text and message.tool_calls:
            pieces.append(f"<|channel|>commentary<|message|>{message.text}")
        elif message.text:
            pieces.append(f"<|channel|>final<|message|>{message.text}")
        pieces += [
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}"
            for call in message.tool_calls
        ]
        return "<|end|><|start|>assistant".join(pieces)


HARMONY = Harmony()
