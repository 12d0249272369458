"""OpenAI Responses, as agents speak it: requests in, answers and events out. `responses_upstream` is the other side.

A turn that was cut off has `status: incomplete` inside `response.completed`: a `response.incomplete` event makes
Codex fail its whole run, and OpenAI's own SDK has no final response then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling
from rollyard.core.errors import BadRequest
from rollyard.core.message import Message, Part, Text, ToolSpec
from rollyard.core.message import tools_digest as digest_tools
from rollyard.wire import openai_shapes, responses_upstream
from rollyard.wire.body import (
    ABSENT,
    WholeNumber,
    digest,
    dump,
    from_agent,
    is_given,
    raw_text,
    read,
    recall_keyed,
    recall_same,
)
from rollyard.wire.codec import Memo, WireRequest
from rollyard.wire.members import BodyReader
from rollyard.wire.options import choice_of, reasoning_of, text_of
from rollyard.wire.parts import PIECE, pieces
from rollyard.wire.responses_items import assistant_items, message_id, message_of
from rollyard.wire.toolnames import custom_tools, in_namespaces


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class _Format(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    input: str | list[msgspec.Raw] = ""
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: msgspec.Raw = ABSENT
    stream: bool | None = None
    max_output_tokens: WholeNumber | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: WholeNumber | None = None
    include: list[str] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _TextConfig | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    tools: list[msgspec.Raw] | None = None


_body = BodyReader(_Body, "responses")
_tools = msgspec.json.Decoder(list[msgspec.Raw])
_tool = msgspec.json.Decoder(_Tool)


def _specs(raw: msgspec.Raw, namespace: str | None = None) -> Iterator[ToolSpec]:
    tool = read(_tool, raw, "tools")
    if tool.type == "namespace":
        for inner in tool.tools or ():
            yield from _specs(inner, tool.name)
    elif tool.type in ("function", "custom") and tool.name is not None:
        schema = raw_text(tool.parameters, "tools") if is_given(tool.parameters) else "{}"
        kept = raw_text(raw, "tools") if tool.type == "custom" else None
        yield ToolSpec(tool.name, tool.description or "", schema, namespace, tool.type, kept)
    else:
        yield ToolSpec(tool.name or tool.type, kind=f"responses/{tool.type}", raw=raw_text(raw, "tools"))


def _tool_specs(raw: msgspec.Raw) -> tuple[tuple[ToolSpec, ...], bytes]:
    specs = tuple(spec for item in read(_tools, raw, "tools") for spec in _specs(item))
    return specs, digest_tools(specs)


class _Turns:
    """Puts the items of one assistant turn together, and remembers the message they made."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._keys: list[bytes] = []
        self._parts: list[Part] = []
        self.messages: list[Message] = []

    def take(self, raw: msgspec.Raw) -> None:
        key = digest(b"responses input", raw)
        found = recall_keyed(self._memo, key, b"responses input", raw, message_of)
        if isinstance(found, Message):
            self.flush()
            self.messages.append(found)
        else:
            self._keys.append(key)
            self._parts.extend(found)

    def flush(self) -> None:
        if self._parts:
            key = digest(b"responses turn", b"".join(self._keys))
            message = self._memo.get(key)
            if message is None:
                message = self._memo[key] = Message("assistant", tuple(self._parts))
            self.messages.append(message)
        self._keys, self._parts = [], []


def _messages(body: _Body, memo: Memo) -> tuple[Message, ...]:
    turns = _Turns(memo)
    if body.instructions:
        turns.messages.append(Message("system", (Text(body.instructions),)))
    if isinstance(body.input, str):
        if body.input:
            turns.messages.append(Message("user", (Text(body.input),)))
    else:
        for raw in body.input:
            turns.take(raw)
        turns.flush()
    return tuple(turns.messages)


def _response_format(body: _Body) -> str | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type != "json_schema":
        return text_of({"type": wanted.type})
    inner: dict[str, Any] = {"name": wanted.name or "answer", "schema": wanted.schema or {}}
    if wanted.strict is not None:
        inner["strict"] = wanted.strict
    return text_of({"type": "json_schema", "json_schema": inner})


def _sampling(body: _Body) -> Sampling:
    reasoning = body.reasoning
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        logprobs=True if "message.output_text.logprobs" in (body.include or ()) else None,
        top_logprobs=body.top_logprobs,
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=reasoning_of(effort=reasoning.effort, summary=reasoning.summary) if reasoning else None,
        response_format=_response_format(body),
    )


@from_agent
def decode(request: WireRequest, memo: Memo | None = None) -> Call:
    body = _body.read(request.body)
    if body.previous_response_id:
        raise BadRequest("previous_response_id: responses are not stored here; send the whole input")
    memo = {} if memo is None else memo
    tools: tuple[ToolSpec, ...] = ()
    tools_digest = b""
    if is_given(body.tools):
        tools, tools_digest = recall_same(memo, b"responses tools", body.tools, _tool_specs)
    return Call(
        id=request.call_id,
        rollout_id=request.rollout_id,
        dialect="responses",
        model=body.model,
        messages=_messages(body, memo),
        tools=tools,
        tools_digest=tools_digest,
        sampling=_sampling(body),
        stream=bool(body.stream),
        include_usage=True,
        raw=request.body,
        headers=request.headers,
        received_at=request.received_at,
    )


_RESPONSE = b'{%b,"status":"%b","background":false,"error":%b,"incomplete_details":%b,%b,"output":%b,%b,"usage":%b,"metadata":{}}'
_SAME = (
    b'"id":%b,"object":"response","created_at":%d',
    b'"instructions":null,"max_output_tokens":%b,"model":%b',
    b'"parallel_tool_calls":%b,"previous_response_id":null,"reasoning":{"effort":null,"summary":null},"store":false,'
    b'"temperature":%b,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_p":%b,"truncation":"disabled"',
)


class _Response:
    """The response object of a call, which several events hold: what is the same in all of them is encoded once."""

    def __init__(self, call: Call) -> None:
        sampling = call.sampling
        first, second, third = _SAME
        parallel = b"false" if sampling.parallel_tool_calls is False else b"true"
        self.parts = (
            first % (dump(f"resp_{call.id}"), int(call.received_at)),
            second % (dump(sampling.max_tokens), dump(call.model)),
            third % (parallel, dump(sampling.temperature), dump(sampling.top_p)),
        )

    def __call__(
        self,
        status: bytes,
        *,
        error: bytes = b"null",
        incomplete: bytes = b"null",
        output: bytes = b"[]",
        usage: bytes = b"null",
    ) -> bytes:
        first, second, third = self.parts
        return _RESPONSE % (first, status, error, incomplete, second, output, third, usage)

    def finished(self, reply: Reply, output: list[bytes]) -> bytes:
        cut = {"length": "max_output_tokens", "refusal": "content_filter"}.get(reply.finish)
        return self(
            b"incomplete" if cut else b"completed",
            incomplete=dump({"reason": cut}) if cut else b"null",
            output=b"[%b]" % b",".join(output),
            usage=openai_shapes.responses_usage(reply),
        )


def _items(call: Call, reply: Reply) -> list[Any]:
    message = in_namespaces(reply.message, call.tools)
    items: list[Any] = []
    logprobs = openai_shapes.logprobs(call, reply)
    for item in assistant_items(message.parts, custom_tools(call.tools), call.id):
        if isinstance(item, dict) and item["type"] != "reasoning":
            item["status"] = "completed"
        if isinstance(item, dict) and item["type"] == "message":
            for block in item["content"]:
                block["logprobs"], logprobs = logprobs, []
        items.append(item)
    return items


def encode(call: Call, reply: Reply) -> bytes:
    return _Response(call).finished(reply, [dump(item) for item in _items(call, reply)])


class _Events:
    """Events in sequence. Their members are JSON already: what several events say is encoded once."""

    def __init__(self, start: int) -> None:
        self._number = start

    def __call__(self, kind: bytes, members: bytes) -> bytes:
        number = self._number
        self._number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, number, members)


def _item_events(emit: _Events, index: int, item: Any) -> tuple[list[bytes], bytes]:
    """The events of one item, and the item as JSON."""
    place = b'"output_index":%d' % index
    if isinstance(item, dict) and item["type"] == "message":
        events, whole = _message_events(emit, place, item)
    else:
        whole = dump(item)
        if isinstance(item, dict):
            events = list(_inner_events(emit, place, b'"item_id":%b,%b' % (dump(item["id"]), place), item))
        else:
            events = [emit(b"response.output_item.added", b'%b,"item":%b' % (place, whole))]
    events.append(emit(b"response.output_item.done", b'%b,"item":%b' % (place, whole)))
    return events, whole


_MESSAGE = b'{"type":"message","id":%b,"role":"assistant","content":[%b],"status":"%b"}'
_PART = b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}'
_BEGUN_PART = _PART % (b'""', b"[]")


def _message_events(emit: _Events, place: bytes, item: dict[str, Any]) -> tuple[list[bytes], bytes]:
    """As `_item_events`, up to its end."""
    id = dump(item["id"])
    events = [emit(b"response.output_item.added", b'%b,"item":%b' % (place, _MESSAGE % (id, b"", b"in_progress")))]
    parts: list[bytes] = []
    for number, block in enumerate(item["content"]):
        here = b'"item_id":%b,%b,"content_index":%d' % (id, place, number)
        text, logprobs = dump(block["text"]), dump(block["logprobs"])
        events.append(emit(b"response.content_part.added", b'%b,"part":%b' % (here, _BEGUN_PART)))
        shown = logprobs
        for piece in pieces(block["text"]):
            delta = text if len(piece) == len(block["text"]) else dump(piece)
            events.append(emit(b"response.output_text.delta", b'%b,"delta":%b,"logprobs":%b' % (here, delta, shown)))
            shown = b"[]"
        events.append(emit(b"response.output_text.done", b'%b,"text":%b,"logprobs":%b' % (here, text, logprobs)))
        parts.append(_PART % (text, logprobs))
        events.append(emit(b"response.content_part.done", b'%b,"part":%b' % (here, parts[-1])))
    return events, _MESSAGE % (id, b",".join(parts), b"completed")


def _inner_events(emit: _Events, place: bytes, inner: bytes, item: dict[str, Any]) -> Iterator[bytes]:
    """Of another item that is understood; `inner` is the place of what lies in it."""
    if item["type"] == "reasoning":
        begun: dict[str, Any] = {**item, "summary": []}
        yield emit(b"response.output_item.added", b'%b,"item":%b' % (place, dump(begun)))
        for number, block in enumerate(item["summary"]):
            yield from _summary_events(emit, b'%b,"summary_index":%d' % (inner, number), block)
        return
    field, kind = (
        ("arguments", b"response.function_call_arguments")
        if item["type"] == "function_call"
        else ("input", b"response.custom_tool_call_input")
    )
    begun = {**item, "status": "in_progress", field: ""}
    yield emit(b"response.output_item.added", b'%b,"item":%b' % (place, dump(begun)))
    for piece in pieces(item[field]):
        yield emit(kind + b".delta", b'%b,"delta":%b' % (inner, dump(piece)))
    yield emit(kind + b".done", b'%b,"%b":%b' % (inner, field.encode(), dump(item[field])))


def _summary_events(emit: _Events, place: bytes, block: dict[str, Any]) -> Iterator[bytes]:
    yield emit(b"response.reasoning_summary_part.added", b'%b,"part":%b' % (place, dump({**block, "text": ""})))
    for piece in pieces(block["text"]):
        yield emit(b"response.reasoning_summary_text.delta", b'%b,"delta":%b' % (place, dump(piece)))
    yield emit(b"response.reasoning_summary_text.done", b'%b,"text":%b' % (place, dump(block["text"])))
    yield emit(b"response.reasoning_summary_part.done", b'%b,"part":%b' % (place, dump(block)))


def opening(call: Call) -> bytes:
    return _opening(_Response(call))


def _opening(response: _Response) -> bytes:
    emit, begun = _Events(0), b'"response":%b' % response(b"in_progress")
    return emit(b"response.created", begun) + emit(b"response.in_progress", begun)


def _one_text_stream() -> tuple[bytes, Callable[[tuple[bytes, ...]], tuple[bytes, ...]]]:
    """The stream of an answer that is one short text, as a format, and what puts its values in their order. Nearly every answer
    without tools is one, and of its dozen events all but these values is the same: the parts of a `_Response`, the id of the
    item, its text, and the usage."""
    response: Any = _Response.__new__(_Response)
    response.parts = (b"@0@", b"@1@", b"@2@")
    emit = _Events(2)
    block = {"type": "output_text", "text": "@4@", "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "@3@", "role": "assistant", "content": [block], "status": "completed"}
    events, whole = _item_events(emit, 0, item)
    last = emit(b"response.completed", b'"response":%b' % response(b"completed", output=b"[%b]" % whole, usage=b"@5@"))
    literal = re.split(rb'"?@(\d)@"?', b"".join((_opening(response), *events, last)))
    shape = b"%b".join([piece.replace(b"%", b"%%") for piece in literal[::2]])
    return shape, itemgetter(*map(int, literal[1::2]))


_ONE_TEXT, _in_order = _one_text_stream()


def stream(call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
    response = _Response(call)
    parts = reply.message.parts
    if (
        len(parts) == 1
        and type(parts[0]) is Text
        and 0 < len(parts[0].text) <= PIECE
        and reply.finish == "stop"
        and not (opened or call.sampling.logprobs)
    ):
        id, text = dump(message_id(call.id, 1)), dump(parts[0].text)
        yield _ONE_TEXT % _in_order((*response.parts, id, text, openai_shapes.responses_usage(reply)))
        return
    if not opened:
        yield _opening(response)
    emit = _Events(2)
    wholes: list[bytes] = []
    for index, item in enumerate(_items(call, reply)):
        events, whole = _item_events(emit, index, item)
        wholes.append(whole)
        yield from events
    yield emit(b"response.completed", b'"response":%b' % response.finished(reply, wholes))


class ResponsesCodec:
    name: Dialect = "responses"
    upstream_path = "/responses"

    decode = staticmethod(decode)
    encode = staticmethod(encode)
    stream = staticmethod(stream)
    opening = staticmethod(opening)
    error = staticmethod(openai_shapes.error)
    model = staticmethod(openai_shapes.model)
    models = staticmethod(openai_shapes.models)
    encode_request = staticmethod(responses_upstream.encode_request)
    decode_reply = staticmethod(responses_upstream.decode_reply)

    def stream_type(self, call: Call) -> str:
        return "text/event-stream"

    def keepalive(self, call: Call) -> bytes:
        return _Events(1)(b"response.in_progress", b'"response":%b' % _Response(call)(b"in_progress"))

    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes:
        failed = _Response(call)(b"failed", error=dump({"code": code, "message": message}))
        return _Events(2)(b"response.failed", b'"response":%b' % failed)

    def count_tokens(self, count: int) -> bytes:
        return dump({"object": "response.input_tokens", "input_tokens": count})
