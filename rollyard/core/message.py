"""Messages in one canonical form, whatever dialect they came in.

The form is chat-like: roles system, user, assistant, tool; a message is a role and parts. Provider blocks that have no
counterpart survive as `Opaque`. Every message carries a `digest` of its *normalised* content, so that an echo which an
agent has re-serialised (argument spacing, trailing white space, string or list content, cache marks, dropped reasoning)
still matches what was sent. It is a lookup key, never a proof: a token prefix proves.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Text(msgspec.Struct, frozen=True, tag="text", omit_defaults=True, gc=False):
    text: str


class Thinking(msgspec.Struct, frozen=True, tag="thinking", omit_defaults=True, gc=False):
    text: str
    signature: str | None = None
    redacted: bool = False  # `signature` then holds the provider's sealed data


class Image(msgspec.Struct, frozen=True, tag="image", omit_defaults=True, gc=False):
    """Either `data` (base64) with its media type, or `url`."""

    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call", omit_defaults=True, gc=False):
    """`arguments` is the exact JSON text the model produced; it is never re-serialised here."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    signature: str | None = None


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result", omit_defaults=True, gc=False):
    call_id: str
    parts: tuple[Text | Image | Opaque, ...] = ()
    is_error: bool = False
    name: str | None = None


class Opaque(msgspec.Struct, frozen=True, tag="opaque", omit_defaults=True, gc=False):
    """A block of some provider that is carried, not understood."""

    kind: str
    json: str


Part = Text | Thinking | Image | ToolCall | ToolResult | Opaque


def canonical_json(text: str) -> str:
    """Arguments as sorted, tight JSON; text that is not JSON is its own canonical form, and none at all is `{}`."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted").decode()
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text.strip() or "{}"


def _normalise(role: str, parts: tuple[Part, ...]) -> list[Any]:
    if len(parts) == 1 and type(parts[0]) is Text:  # nearly every message
        return [role, parts[0].text.rstrip()]
    words: list[Any] = [role]
    text: list[str] = []
    for part in parts:
        if isinstance(part, Text):
            text.append(part.text)
        elif isinstance(part, ToolCall):
            words.append([part.namespace or "", part.name, canonical_json(part.arguments)])
        elif isinstance(part, ToolResult):
            inner = "".join(p.text for p in part.parts if isinstance(p, Text)).rstrip()
            images = [p.data or p.url or "" for p in part.parts if isinstance(p, Image)]
            words.append([part.call_id, inner, images])
        elif isinstance(part, Image):
            words.append([part.data or part.url or ""])
        elif isinstance(part, Opaque):
            words.append([part.kind, part.json])
    words.append("".join(text).rstrip())
    return words


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None
    digest: bytes = b""

    def __post_init__(self) -> None:
        if not self.digest:
            packed = msgspec.msgpack.encode(_normalise(self.role, self.parts))
            msgspec.structs.force_setattr(self, "digest", hashlib.blake2b(packed, digest_size=16).digest())

    @property
    def text(self) -> str:
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is Text:
            return parts[0].text
        return "".join([p.text for p in parts if isinstance(p, Text)])

    @property
    def thinking(self) -> str:
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is Text:
            return ""
        return "".join([p.text for p in parts if isinstance(p, Thinking) and not p.redacted])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is Text:
            return ()
        return tuple([p for p in parts if isinstance(p, ToolCall)])

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple([p for p in self.parts if isinstance(p, ToolResult)])


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool offered to the model. `schema` is the JSON Schema of its arguments as JSON text; `kind` other than
    `function` names a provider's own tool, carried in `raw`."""

    name: str
    description: str = ""
    schema: str = "{}"
    namespace: str | None = None
    kind: str = "function"
    raw: str | None = None


def tools_digest(tools: tuple[ToolSpec, ...]) -> bytes:
    packed = msgspec.msgpack.encode([[t.namespace, t.name, t.kind, t.description, t.schema] for t in tools])
    return hashlib.blake2b(packed, digest_size=16).digest()
