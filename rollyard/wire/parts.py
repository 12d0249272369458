"""Parts that several dialects write alike: images as data URLs, tool arguments as JSON objects, text in bounded pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollyard.core.ids import new_id
from rollyard.core.message import Image, Opaque, Part, Text
from rollyard.wire.body import dump, parse_object

PIECE = 8192  # characters per streamed delta: some clients read lines of at most 64 kB
UNPARSED = "_unparsed_arguments"


def image_from_url(url: str) -> Image:
    """A data URL becomes data; any other URL stays one."""
    if url.startswith("data:"):
        head, comma, data = url[5:].partition(",")
        if comma and head.endswith(";base64"):
            return Image(media_type=head.removesuffix(";base64") or None, data=data)
    return Image(url=url)


def image_url(image: Image) -> str:
    if image.data is None:
        return image.url or ""
    return f"data:{image.media_type or ''};base64,{image.data}"


def arguments_object(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """Arguments where the wire wants a JSON object: the exact text when it is one. A model that was cut off in the middle
    leaves text that is none; it travels under a key of its own, and comes back as it was."""
    if parse_object(arguments) is not None:
        return msgspec.Raw(arguments.encode())
    return {} if not arguments.strip() else {UNPARSED: arguments}


def arguments_text(raw: str) -> str:
    if UNPARSED in raw:
        given = parse_object(raw)
        if given is not None and given.keys() == {UNPARSED} and isinstance(given[UNPARSED], str):
            return given[UNPARSED]
    return raw


def call_id(wanted: str | None) -> str:
    """A tool call's id; every call has one, also from servers that send none."""
    return wanted or new_id("call")


def opaque(dialect: str, kind: str, value: Any) -> Opaque:
    return Opaque(f"{dialect}/{kind}", dump(value).decode())


def texts(parts: tuple[Part, ...]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Text)]


def pieces(text: str) -> Sequence[str]:
    if len(text) <= PIECE:
        return (text,) if text else ()
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
