"""Content parts of the Gemini dialect <-> ours.

A signature may sit on any part there. On a thought or a call it has a place of its own; on a text it becomes a `Thinking`
without text right after it, and goes back onto that text. A call or response without an id is known by its name.

Field names come in camel case and in snake case, by Google's own SDK in one and the same body; a `_snake` field is the
second name of the one above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from rollyard.core.errors import BadRequest
from rollyard.core.message import Image, Message, Opaque, Part, Text, Thinking, ToolCall, ToolResult
from rollyard.wire.body import ABSENT, dump, is_given, raw_text, read, read_object
from rollyard.wire.members import refuse_stored
from rollyard.wire.parts import arguments_object, arguments_text, opaque, texts
from rollyard.wire.toolnames import flat_name

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")


class _Call(msgspec.Struct):
    name: str
    id: str | None = None
    args: msgspec.Raw = ABSENT


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str | None = None
    mime_type_snake: str | None = msgspec.field(name="mime_type", default=None)
    data: str | None = None
    file_uri: str | None = None
    file_uri_snake: str | None = msgspec.field(name="file_uri", default=None)


class _ResponsePart(msgspec.Struct, rename="camel"):
    inline_data: _Blob | None = None
    inline_data_snake: _Blob | None = msgspec.field(name="inline_data", default=None)
    file_data: _Blob | None = None
    file_data_snake: _Blob | None = msgspec.field(name="file_data", default=None)

    @property
    def blob(self) -> _Blob | None:
        return self.inline_data or self.inline_data_snake or self.file_data or self.file_data_snake


class _Response(msgspec.Struct):
    name: str
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[_ResponsePart] | None = None


class _Part(_ResponsePart, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    thought_signature_snake: str | None = msgspec.field(name="thought_signature", default=None)
    function_call: _Call | None = None
    function_call_snake: _Call | None = msgspec.field(name="function_call", default=None)
    function_response: _Response | None = None
    function_response_snake: _Response | None = msgspec.field(name="function_response", default=None)


class Content(msgspec.Struct):
    role: str | None = None
    parts: list[msgspec.Raw] | None = None


_part = msgspec.json.Decoder(_Part)
content_decoder = msgspec.json.Decoder(Content)


def _image(blob: _Blob | None) -> Image | None:
    if blob is None:
        return None
    mime_type = blob.mime_type or blob.mime_type_snake
    if mime_type is None or not mime_type.startswith("image/"):
        return None
    if blob.data is not None:
        return Image(media_type=mime_type, data=blob.data)
    return Image(media_type=mime_type, url=blob.file_uri or blob.file_uri_snake)


def _result(response: _Response) -> ToolResult:
    body = response.response or {}
    is_error = False
    if body.keys() == {"output"} and isinstance(body["output"], str):
        text = body["output"]
    elif body.keys() == {"error"} and isinstance(body["error"], str):
        text, is_error = body["error"], True
    else:
        text = dump(body).decode() if body else ""
    images = [_image(part.blob) for part in response.parts or ()]
    parts = (*((Text(text),) if text else ()), *(image for image in images if image is not None))
    return ToolResult(response.id or response.name, parts, is_error, response.name)


def parts_of(raw: msgspec.Raw) -> tuple[Part, ...]:
    part = read(_part, raw, "contents")
    signature = part.thought_signature or part.thought_signature_snake
    call = part.function_call or part.function_call_snake
    if call is not None:
        arguments = raw_text(call.args, "contents") if is_given(call.args) else "{}"
        return (ToolCall(call.id or call.name, call.name, arguments_text(arguments), None, signature),)
    response = part.function_response or part.function_response_snake
    if response is not None:
        return (_result(response),)
    if part.text is not None:
        if part.thought:
            return (Thinking(part.text, signature),) if part.text or signature else ()
        text = (Text(part.text),) if part.text else ()
        return (*text, Thinking("", signature)) if signature else text
    image = _image(part.blob)
    if image is not None:
        return (image,)
    value = read_object(raw, "contents")
    return (opaque("gemini", next(iter(value)), value),) if value else ()


def _given_parts(raw: msgspec.Raw) -> tuple[Part, ...]:
    """An agent's part: one that holds its content, and does not name a file that the provider keeps or would fetch."""
    if b"file" in memoryview(raw).tobytes():
        value = read(_part, raw, "contents")
        response = value.function_response or value.function_response_snake
        for part in (value, *(response.parts or () if response is not None else ())):
            if part.file_data is not None or part.file_data_snake is not None:
                refuse_stored("fileData", {})
    return parts_of(raw)


def messages_of(raw: msgspec.Raw) -> tuple[Message, ...]:
    content = read(content_decoder, raw, "contents")
    parts = [part for item in content.parts or () for part in _given_parts(item)]
    if content.role in ("model", "assistant"):
        return (Message("assistant", tuple(parts)),)
    if content.role == "system":
        return (Message("system", tuple(parts)),)
    if content.role not in (None, "", "user", "function", "tool"):
        raise BadRequest(f"contents: unknown role {content.role[:40]!r}")
    results = [part for part in parts if isinstance(part, ToolResult)]
    if not results:
        return (Message("user", tuple(parts)),)
    rest = tuple(part for part in parts if not isinstance(part, ToolResult))
    tools = tuple(Message("tool", (result,)) for result in results)
    return (*tools, Message("user", rest)) if rest else tools


def _sign(value: dict[str, Any], signature: str | None) -> dict[str, Any]:
    """Signatures are bytes on this wire: one that is not base64 is some other provider's, and stays behind."""
    if signature and len(signature) % 4 == 0 and _BASE64.fullmatch(signature):
        value["thoughtSignature"] = signature
    return value


def _arguments(arguments: str) -> Any:
    value = arguments_object(arguments)
    # a frame is one line, so the model's own line breaks between members go
    return msgspec.Raw(msgspec.json.format(bytes(value), indent=-1)) if isinstance(value, msgspec.Raw) else value


def wire_parts(parts: Iterable[Part], names: Mapping[str, str] | None = None) -> Iterator[Any]:
    """`names` finds the function a result belongs to."""
    text: dict[str, Any] | None = None
    for part in parts:
        if isinstance(part, Thinking) and not part.text and text is not None:
            _sign(text, part.signature)
            continue
        if text is not None:
            yield text
            text = None
        if isinstance(part, Text):
            text = {"text": part.text}
        elif isinstance(part, Thinking):
            if part.text:
                yield _sign({"text": part.text, "thought": True}, part.signature)
            elif part.signature and not part.redacted:
                yield _sign({"text": ""}, part.signature)
        elif isinstance(part, ToolCall):
            call = {"id": part.id, "name": flat_name(part), "args": _arguments(part.arguments)}
            yield _sign({"functionCall": call}, part.signature)
        elif isinstance(part, ToolResult):
            yield {"functionResponse": _response(part, names or {})}
        elif isinstance(part, Image):
            yield _blob(part)
        elif isinstance(part, Opaque) and part.kind.startswith("gemini/"):
            yield msgspec.Raw(part.json.encode())
    if text is not None:
        yield text


def _blob(image: Image) -> dict[str, Any]:
    mime_type = image.media_type or "image/png"
    if image.data is not None:
        return {"inlineData": {"mimeType": mime_type, "data": image.data}}
    return {"fileData": {"mimeType": mime_type, "fileUri": image.url or ""}}


def _response(result: ToolResult, names: Mapping[str, str]) -> dict[str, Any]:
    text = "".join(texts(result.parts))
    name = result.name or names.get(result.call_id) or result.call_id
    body = {"id": result.call_id, "name": name, "response": {"error" if result.is_error else "output": text}}
    images = [_blob(part) for part in result.parts if isinstance(part, Image)]
    return {**body, "parts": images} if images else body
