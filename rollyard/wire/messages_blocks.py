"""Content blocks of the Messages dialect <-> parts. A block that is not understood is carried, without its cache mark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollyard.core.errors import BadRequest
from rollyard.core.message import Image, Opaque, Part, Text, Thinking, ToolCall, ToolResult
from rollyard.wire.body import ABSENT, is_given, raw_text, read, read_object
from rollyard.wire.members import refuse_stored
from rollyard.wire.parts import arguments_object, arguments_text, opaque
from rollyard.wire.toolnames import flat_name


class ContentBlock(msgspec.Struct):
    """Every field of the blocks that are understood; a block has some of them."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    tool_use_id: str | None = None
    content: msgspec.Raw = ABSENT
    is_error: bool | None = None
    source: dict[str, Any] | None = None


_block = msgspec.json.Decoder(ContentBlock)
_content = msgspec.json.Decoder(str | list[msgspec.Raw])


def _opaque(raw: msgspec.Raw, kind: str) -> Opaque:
    value = read_object(raw, "messages")
    refuse_stored(kind, value)
    value.pop("cache_control", None)
    return opaque("messages", kind, value)


def _image(block: ContentBlock) -> Image | None:
    source = block.source or {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        media_type = source.get("media_type")
        return Image(media_type=media_type if isinstance(media_type, str) else None, data=source["data"])
    if source.get("type") == "url" and isinstance(source.get("url"), str):
        return Image(url=source["url"])
    return None


def _result(block: ContentBlock) -> ToolResult:
    if block.tool_use_id is None:
        raise BadRequest("messages: a tool_result has no tool_use_id")
    content = read(_content, block.content, "messages") if is_given(block.content) else ""
    if isinstance(content, str):
        parts: tuple[Text | Image | Opaque, ...] = (Text(content),) if content else ()
    else:
        parts = tuple(p for p in map(part_of, content) if isinstance(p, Text | Image | Opaque))
    return ToolResult(block.tool_use_id, parts, is_error=bool(block.is_error))


def part_of(raw: msgspec.Raw) -> Part | None:
    """One content block; None for an empty text."""
    block = read(_block, raw, "messages")
    kind = block.type
    if kind == "text" and block.text is not None:
        return Text(block.text) if block.text else None
    if kind == "tool_use" and block.name is not None:
        arguments = raw_text(block.input, "messages") if is_given(block.input) else "{}"
        return ToolCall(block.id or "", block.name, arguments_text(arguments))
    if kind == "tool_result":
        return _result(block)
    if kind == "thinking" and block.thinking is not None:
        return Thinking(block.thinking, block.signature or None)
    if kind == "redacted_thinking":
        return Thinking("", block.data, redacted=True)
    if kind == "image":
        image = _image(block)
        if image is not None:
            return image
    return _opaque(raw, kind)


def blocks(parts: Iterable[Part]) -> Iterator[Any]:
    """Parts as blocks; what only another dialect understands is left out."""
    for part in parts:
        if isinstance(part, Text):
            yield {"type": "text", "text": part.text}
        elif isinstance(part, ToolCall):
            name = flat_name(part)
            yield {"type": "tool_use", "id": part.id, "name": name, "input": arguments_object(part.arguments)}
        elif isinstance(part, Thinking):
            if part.redacted:
                yield {"type": "redacted_thinking", "data": part.signature or ""}
            else:
                yield {"type": "thinking", "thinking": part.text, "signature": part.signature or ""}
        elif isinstance(part, ToolResult):
            yield _result_block(part)
        elif isinstance(part, Image):
            yield _image_block(part)
        elif isinstance(part, Opaque) and part.kind.startswith("messages/"):
            yield msgspec.Raw(part.json.encode())


def _image_block(image: Image) -> dict[str, Any]:
    if image.data is None:
        return {"type": "image", "source": {"type": "url", "url": image.url or ""}}
    source = {"type": "base64", "media_type": image.media_type or "image/png", "data": image.data}
    return {"type": "image", "source": source}


def _result_block(result: ToolResult) -> dict[str, Any]:
    content = list(blocks(result.parts))
    only = result.parts[0] if len(result.parts) == 1 else None
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": result.call_id}
    block["content"] = only.text if isinstance(only, Text) else content
    if result.is_error:
        block["is_error"] = True
    return block
