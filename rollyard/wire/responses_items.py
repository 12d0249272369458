"""Items of the Responses dialect <-> messages and parts.

One assistant turn is several items there (reasoning, message, calls); canonically it is one message with those parts in
order. A reasoning item's id and sealed content must come back unchanged to the provider that made them: they ride in
`Thinking.signature` as JSON. Ids that we made ourselves carry no meaning and are dropped on the way in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollyard.core.errors import BadRequest
from rollyard.core.message import Image, Message, Opaque, Part, Role, Text, Thinking, ToolCall, ToolResult
from rollyard.wire.body import parse_object, read, read_object
from rollyard.wire.members import refuse_stored
from rollyard.wire.options import text_of
from rollyard.wire.parts import image_from_url, image_url, opaque
from rollyard.wire.toolnames import custom_arguments, custom_input

OWN = "_ry_"  # in every item id that we make
_SEALED = ("id", "encrypted_content", "content", "summary")


class Item(msgspec.Struct):
    """Every field of the items that are understood; an item has some of them."""

    type: str | None = None
    role: str | None = None
    id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


_item = msgspec.json.Decoder(Item)
_ROLES: dict[str, Role] = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def parts_of(content: str | list[dict[str, Any]] | None) -> tuple[Text | Image | Opaque, ...]:
    if content is None or isinstance(content, str):
        return (Text(content),) if content else ()
    parts: list[Text | Image | Opaque] = []
    for block in content:
        kind = block.get("type")
        text = block.get("refusal") if kind == "refusal" else block.get("text")
        if kind in ("input_text", "output_text", "text", "refusal", "summary_text") and isinstance(text, str):
            if text:
                parts.append(Text(text))
        elif kind == "input_image" and isinstance(block.get("image_url"), str):
            parts.append(image_from_url(block["image_url"]))
        elif isinstance(kind, str):
            refuse_stored(kind, block)
            parts.append(opaque("responses", kind, block))
        else:
            raise BadRequest("input: a content part has no type")
    return tuple(parts)


def _texts(blocks: list[dict[str, Any]] | str | None) -> list[str]:
    if not isinstance(blocks, list):
        return [blocks] if blocks else []
    return [block["text"] for block in blocks if isinstance(block.get("text"), str)]


def _thinking(item: Item) -> Thinking | None:
    summaries, contents = _texts(item.summary), _texts(item.content)
    sealed: dict[str, Any] = {}
    if item.id and OWN not in item.id:
        sealed["id"] = item.id
    if item.encrypted_content:
        sealed["encrypted_content"] = item.encrypted_content
    if contents:
        sealed["content"] = item.content
    if len(summaries) > 1 or (contents and summaries):
        sealed["summary"] = item.summary
    text = "\n\n".join(summaries) or "".join(contents)
    signature = text_of(sealed) if sealed.keys() - {"encrypted_content"} else item.encrypted_content
    return Thinking(text, signature or None) if text or signature else None


def reasoning_item(part: Thinking, own_id: str) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "reasoning", "id": own_id, "summary": []}
    sealed = parse_object(part.signature) if part.signature and part.signature.startswith("{") else None
    if sealed is not None and sealed.keys() <= set(_SEALED):
        if part.text and "content" not in sealed:
            item["summary"] = [{"type": "summary_text", "text": part.text}]
        item.update(sealed)
        return item
    if part.text:
        item["summary"] = [{"type": "summary_text", "text": part.text}]
    if part.signature:
        item["encrypted_content"] = part.signature
    return item


def message_of(raw: msgspec.Raw) -> Message | tuple[Part, ...]:
    """A whole message, or the parts that an item adds to the assistant's turn."""
    item = read(_item, raw, "input")
    kind = item.type or "message"
    if kind == "message" or (item.type is None and item.role):
        role = _ROLES.get(item.role or "user")
        if role is None:
            raise BadRequest(f"input: unknown role {str(item.role)[:40]!r}")
        parts = parts_of(item.content)
        return parts if role == "assistant" else Message(role, parts)
    if kind == "reasoning":
        thinking = _thinking(item)
        return (thinking,) if thinking is not None else ()
    if kind in ("function_call", "custom_tool_call"):
        return (call_of(item),)
    if kind in ("function_call_output", "custom_tool_call_output"):
        if item.call_id is None:
            raise BadRequest(f"input: a {kind} has no call_id")
        return Message("tool", (ToolResult(item.call_id, parts_of(item.output)),))
    value = read_object(raw, "input")
    refuse_stored(kind, value)
    part = opaque("responses", kind, value)
    return Message("user", (part,)) if kind.endswith("_output") else (part,)


def call_of(item: Item) -> ToolCall:
    if item.name is None:
        raise BadRequest(f"input: a {item.type} has no name")
    if item.type == "custom_tool_call":
        arguments = custom_arguments(item.input or "")
    else:
        arguments = item.arguments if item.arguments is not None else "{}"
    return ToolCall(item.call_id or "", item.name, arguments, item.namespace)


def content_blocks(parts: Iterable[Part], text_type: str) -> list[Any]:
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, Text):
            blocks.append({"type": text_type, "text": part.text})
        elif isinstance(part, Image):
            blocks.append({"type": "input_image", "image_url": image_url(part), "detail": "auto"})
        elif isinstance(part, Opaque) and part.kind.startswith("responses/"):
            blocks.append(msgspec.Raw(part.json.encode()))
    return blocks


def call_item(part: ToolCall, customs: set[tuple[str | None, str]]) -> dict[str, Any]:
    """A call without its own id and status; names stay in their namespace."""
    item: dict[str, Any] = {"call_id": part.id, "name": part.name}
    if (part.namespace, part.name) in customs:
        item |= {"type": "custom_tool_call", "input": custom_input(part.arguments)}
    else:
        item |= {"type": "function_call", "arguments": part.arguments}
    if part.namespace:
        item["namespace"] = part.namespace
    return item


def message_id(seed: str, index: int) -> str:
    return f"msg{OWN}{seed}_{index}"


def assistant_items(
    parts: tuple[Part, ...], customs: set[tuple[str | None, str]], seed: str
) -> Iterator[dict[str, Any] | msgspec.Raw]:
    """Parts of one assistant turn as items, in order; neighbouring texts share one message. `seed` goes into the ids."""
    run: list[Text] = []
    for index, part in enumerate(parts):
        if isinstance(part, Text):
            run.append(part)
            continue
        if run:
            yield _message_item(run, message_id(seed, index))
            run = []
        if isinstance(part, ToolCall):
            item = call_item(part, customs)
            prefix = "ctc" if item["type"] == "custom_tool_call" else "fc"
            yield {**item, "id": f"{prefix}{OWN}{seed}_{index}"}
        elif isinstance(part, Thinking):
            yield reasoning_item(part, f"rs{OWN}{seed}_{index}")
        elif isinstance(part, Opaque) and part.kind.startswith("responses/"):
            yield msgspec.Raw(part.json.encode())
    if run:
        yield _message_item(run, message_id(seed, len(parts)))


def _message_item(run: list[Text], own_id: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": part.text, "annotations": []} for part in run]
    return {"type": "message", "id": own_id, "role": "assistant", "content": content}
