"""What a remote tool's result means: `ToolAnswer`, made from MCP's content blocks and from nothing else.

A block that cannot be shown as text or as an image is named in words (its kind, address, type), never as some object's repr:
whatever is made here goes to a model. An image without bytes is an error that the model can read, not a broken message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.message import Image, Text

NO_IMAGE = "error: the tool returned an image without data"


class ToolAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is what the tool meant: parsed JSON, structured content, plain text, `{"error": text}` for a failure, or a list of
    OpenAI content parts where there are images. `text` is every text of it, and `images` every image as a data URL."""

    value: Any
    text: str
    images: tuple[str, ...] = ()
    is_error: bool = False

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """As the content of an OpenAI tool message."""
        return cast("list[dict[str, Any]]", self.value) if self.images and not self.is_error else self.text

    @property
    def parts(self) -> tuple[Text | Image, ...]:
        """The same as parts of a message."""
        texts = (Text(self.text),) if self.text else ()
        return (*texts, *(_image(url) for url in self.images))


def read(blocks: Sequence[Any], structured: Any = None, *, is_error: bool = False) -> ToolAnswer:
    """From the blocks of a `tools/call` result, as the `mcp` package's values or as plain mappings."""
    parts = [_part(_fields(block)) for block in blocks]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    images = tuple(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
    text = "\n".join(texts)
    if not text and structured is not None:
        text = msgspec.json.encode(structured).decode()
    broken = is_error or NO_IMAGE in texts
    if broken:
        value: Any = {"error": text or "the tool failed and said nothing"}
        return ToolAnswer(value=value, text=value["error"], images=images, is_error=True)
    if images:
        return ToolAnswer(value=parts, text=text, images=images)
    return ToolAnswer(value=_merge(texts, structured), text=text)


def invalid(problems: Iterable[str]) -> ToolAnswer:
    """A result that is not MCP."""
    words = f"error: the tool's result is not valid: {'; '.join(problems)}"
    return ToolAnswer(value={"error": words}, text=words, is_error=True)


def _merge(texts: Sequence[str], structured: Any) -> Any:
    if structured is not None:
        # Some servers wrap what is not an object as {"result": value}; a tool's own such object has itself as its text, too.
        wrapped = isinstance(structured, Mapping) and set(cast("Mapping[str, Any]", structured)) == {"result"}
        return structured["result"] if wrapped and [_parse(text) for text in texts] != [structured] else structured
    return _parse(texts[0]) if len(texts) == 1 else "\n".join(texts)


def _parse(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except BAD_JSON:
        return text


def _image(url: str) -> Image:
    about, _, data = url.partition(";base64,")
    return Image(media_type=about.removeprefix("data:"), data=data)


def _fields(block: Any) -> dict[str, Any]:
    if isinstance(block, Mapping):
        return dict(cast("Mapping[str, Any]", block))
    return block.model_dump(by_alias=True, mode="json", exclude_none=True)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "image":
        data = block.get("data")
        if not data:
            return _text(NO_IMAGE)
        return {"type": "image_url", "image_url": {"url": f"data:{block.get('mimeType') or 'image/png'};base64,{data}"}}
    if kind == "text":
        return _text(str(block.get("text") or ""))
    if kind == "resource":
        inner: dict[str, Any] = block.get("resource") or {}
        return _text(inner["text"] if inner.get("text") is not None else _name("resource", inner))
    return _text(_name(str(kind), block))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _name(kind: str, block: Mapping[str, Any]) -> str:
    known = [str(block[name]) for name in ("name", "uri", "mimeType") if block.get(name)]
    return f"[{' '.join([kind, *known])}]"
