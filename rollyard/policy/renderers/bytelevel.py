"""The byte model: every UTF-8 byte is a token, and each role has one special token.

    <role> bytes of the message <end>        and `<assistant>` alone where the model is to speak

It is the vocabulary of the scripted policy and of the small model of the training example. Each message stands alone, so
a bridge is plain concatenation and always proven.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from rollyard.core.call import ids as to_ids
from rollyard.core.message import Message, Opaque, Text, ToolResult, ToolSpec
from rollyard.policy.parsers.protocol import ReplyParser
from rollyard.policy.parsers.tagged import HERMES
from rollyard.policy.renderers.protocol import Bridged, SampledTurn

PAD, SYSTEM, USER, ASSISTANT, TOOL, END = range(256, 262)
VOCABULARY = 262
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
NAMES = {PAD: "<pad>", SYSTEM: "<system>", USER: "<user>", ASSISTANT: "<assistant>", TOOL: "<tool>", END: "<end>"}


class ByteRenderer:
    """`tools="omit"` leaves the tool descriptions out of the prompt, for a model with a short memory."""

    name = "bytes"
    stop_ids = (END,)

    def __init__(self, *, parser: ReplyParser = HERMES, tools: Literal["json", "omit"] = "json") -> None:
        self.parser = parser
        self.tools = tools

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> array[int]:
        out = to_ids()
        if tools and self.tools == "json":
            out.append(SYSTEM)
            out.extend("\n".join(f"{t.name}: {t.description} {t.schema}" for t in tools).encode())
            out.append(END)
        for message in messages:
            self._append(out, message)
        out.append(ASSISTANT)
        return out

    def bridge(self, turn: SampledTurn, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Bridged:
        closed = len(turn.completion) > 0 and turn.completion[-1] == END
        out = to_ids() if closed else to_ids([END])
        for message in new:
            self._append(out, message)
        out.append(ASSISTANT)
        return Bridged(out, () if closed else ((0, 1),))

    def parse(self, completion: array[int], tools: Sequence[ToolSpec] = ()) -> Message:
        end = len(completion)
        while end and completion[end - 1] == END:
            end -= 1
        return self.parser.parse(self.decode(completion[:end]), tools)

    def completion_of(self, message: Message) -> array[int]:
        """The ids with which a model of this vocabulary would say `message`."""
        out = to_ids()  # extended below: the array constructor would read bytes as packed integers
        out.extend(self.parser.format(message).encode("utf-8", "surrogatepass"))
        out.append(END)
        return out

    def decode(self, ids: array[int]) -> str:
        pieces: list[bytes] = []
        for token in ids:
            pieces.append(bytes((token,)) if token < 256 else NAMES.get(token, f"<{token}>").encode())
        return b"".join(pieces).decode("utf-8", "replace")

    def _append(self, out: array[int], message: Message) -> None:
        out.append(ROLE[message.role])
        text = self.parser.format(message) if message.role == "assistant" else context_text(message)
        out.extend(text.encode("utf-8", "surrogatepass"))
        out.append(END)


def context_text(message: Message) -> str:
    """What a text model can see of a message that it did not write."""
    words: list[str] = []
    for part in message.parts:
        if isinstance(part, Text):
            words.append(part.text)
        elif isinstance(part, ToolResult):
            words.extend(p.text if isinstance(p, Text) else f"[{type(p).__name__.lower()}]" for p in part.parts)
        elif isinstance(part, Opaque):
            words.append(f"[{part.kind}]")
    return "".join(words)
