"""Anthropic Messages, as agents speak it: requests in, answers and SSE events out. `messages_upstream` is the other side.

A user turn that holds tool results becomes `tool` messages followed by a `user` message with the rest. Claude Code moves
`cache_control` about between turns and puts `role: system` messages inside the history: the first is left out of the
canonical form, the second keeps its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling
from rollyard.core.errors import BadRequest, ThreadNotFound
from rollyard.core.message import Message, Part, Text, ToolResult, ToolSpec
from rollyard.core.message import tools_digest as digest_tools
from rollyard.wire import messages_upstream
from rollyard.wire.body import ABSENT, WholeNumber, dump, from_agent, is_given, raw_text, read, recall, recall_same
from rollyard.wire.codec import Memo, WireRequest
from rollyard.wire.members import BodyReader
from rollyard.wire.messages_blocks import blocks, part_of
from rollyard.wire.openai_shapes import counts
from rollyard.wire.options import name_choice, reasoning_of, text_of
from rollyard.wire.parts import pieces
from rollyard.wire.sse import frame


class _Thinking(msgspec.Struct):
    type: str = ""
    budget_tokens: WholeNumber | None = None


class _Thread(msgspec.Struct):
    type: str = ""


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    stream: bool | None = None
    max_tokens: WholeNumber | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    thread: _Thread | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[msgspec.Raw] = ""


class _System(msgspec.Struct):
    text: str = ""


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT


_body = BodyReader(_Body, "messages")
_message = msgspec.json.Decoder(_Message)
_system = msgspec.json.Decoder(str | list[_System])
_tools = msgspec.json.Decoder(list[msgspec.Raw])
_tool = msgspec.json.Decoder(_Tool)


def _history_item(raw: msgspec.Raw) -> tuple[Message, ...]:
    item = read(_message, raw, "messages")
    if isinstance(item.content, str):
        parts: list[Part] = [Text(item.content)] if item.content else []
    else:
        parts = [part for part in map(part_of, item.content) if part is not None]
    if item.role == "assistant":
        return (Message("assistant", tuple(parts)),)
    if item.role in ("system", "developer"):
        return (Message("system", tuple(parts)),)
    if item.role != "user":
        raise BadRequest(f"messages: unknown role {item.role[:40]!r}")
    results = [part for part in parts if isinstance(part, ToolResult)]
    if not results:
        return (Message("user", tuple(parts)),)
    rest = tuple(part for part in parts if not isinstance(part, ToolResult))
    tools = tuple(Message("tool", (result,)) for result in results)
    return (*tools, Message("user", rest)) if rest else tools


def _system_message(raw: msgspec.Raw) -> tuple[Message, ...]:
    content = read(_system, raw, "system")
    found = [content] if isinstance(content, str) else [block.text for block in content]
    parts = tuple(Text(text) for text in found if text)
    return (Message("system", parts),) if parts else ()


def _tool_specs(raw: msgspec.Raw) -> tuple[tuple[ToolSpec, ...], bytes]:
    specs: list[ToolSpec] = []
    for item in read(_tools, raw, "tools"):
        tool = read(_tool, item, "tools")
        if tool.type in (None, "custom", "function"):
            schema = raw_text(tool.input_schema, "tools") if is_given(tool.input_schema) else "{}"
            specs.append(ToolSpec(tool.name, tool.description or "", schema))
        else:
            specs.append(ToolSpec(tool.name, kind=f"messages/{tool.type}", raw=raw_text(item, "tools")))
    return tuple(specs), digest_tools(tuple(specs))


def _choice(value: dict[str, Any] | None) -> str | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind == "tool" and isinstance(value.get("name"), str):
        return name_choice(value["name"])
    return {"auto": "auto", "any": "required", "none": "none"}.get(str(kind)) or text_of(value)


def _reasoning(body: _Body) -> str | None:
    thinking = body.thinking
    if thinking is None and body.output_config is None:
        return None
    return reasoning_of(
        enabled=None if thinking is None else thinking.type != "disabled",
        budget=thinking.budget_tokens if thinking else None,
        effort=body.output_config.effort if body.output_config else None,
    )


def _response_format(body: _Body) -> str | None:
    wanted = (body.output_config.format if body.output_config else None) or body.output_format
    if not wanted or wanted.get("type") != "json_schema":
        return None
    inner = {"name": "answer", "schema": wanted.get("schema") or {}}
    return text_of({"type": "json_schema", "json_schema": inner})


def _sampling(body: _Body) -> Sampling:
    alone = None if body.tool_choice is None else body.tool_choice.get("disable_parallel_tool_use")
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=(not alone) if isinstance(alone, bool) else None,
        reasoning=_reasoning(body),
        response_format=_response_format(body),
    )


def _check_thread(thread: _Thread | None) -> None:
    """A thread is a conversation that the provider holds, so that a turn sends only what is new. A request that begins one
    holds all of it. One that continues one is refused with the code on which clients send all of it again."""
    if thread is None or thread.type == "create":
        return
    if thread.type == "continue":
        raise ThreadNotFound("thread: conversations are not kept here; send all messages, with a new thread or none")
    raise BadRequest(f"thread: unknown type {thread.type[:40]!r}")


@from_agent
def decode(request: WireRequest, memo: Memo | None = None) -> Call:
    body = _body.read(request.body)
    _check_thread(body.thread)
    memo = {} if memo is None else memo
    messages: list[Message] = []
    if is_given(body.system):
        messages.extend(recall_same(memo, b"messages system", body.system, _system_message))
    for raw in body.messages:
        messages.extend(recall(memo, b"messages", raw, _history_item))
    tools: tuple[ToolSpec, ...] = ()
    tools_digest = b""
    if is_given(body.tools):
        tools, tools_digest = recall_same(memo, b"messages tools", body.tools, _tool_specs)
    return Call(
        id=request.call_id,
        rollout_id=request.rollout_id,
        dialect="messages",
        model=body.model,
        messages=tuple(messages),
        tools=tools,
        tools_digest=tools_digest,
        sampling=_sampling(body),
        stream=bool(body.stream),
        include_usage=True,
        raw=request.body,
        headers=request.headers,
        received_at=request.received_at,
    )


def _stop_reason(reply: Reply) -> str:
    if reply.finish == "length":
        return "max_tokens"
    if reply.finish == "refusal":
        return "refusal"
    if reply.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if reply.stop_reason == "stop_sequence" else "end_turn"


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, completion = counts(reply)
    cached = min(reply.usage.cached_tokens or 0, prompt)
    usage: dict[str, Any] = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
    if reply.usage.reasoning_tokens is not None:
        usage["output_tokens_details"] = {"thinking_tokens": reply.usage.reasoning_tokens}
    return usage


def _envelope(call: Call) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}


def encode(call: Call, reply: Reply) -> bytes:
    body = _envelope(call)
    body["content"] = list(blocks(reply.message.parts))
    body["stop_reason"] = _stop_reason(reply)
    body["stop_sequence"] = None
    body["usage"] = _usage(reply)
    return dump(body)


_BLOCK_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_BLOCK_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_MESSAGE_DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"%b","stop_sequence":null},'
    b'"usage":%b}\n\n'
)
_TEXT = b'{"type":"text","text":""}'
_MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":%b,"type":"message","role":"assistant","model":%b,'
    b'"content":[],"stop_reason":null,"stop_sequence":null,"usage":%b}}\n\n'
)
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def _block_events(index: int, block: Any) -> list[bytes]:
    kind = block["type"] if isinstance(block, dict) else None
    deltas: list[bytes] = []
    if kind == "text":
        start = _TEXT
        deltas = [b'{"type":"text_delta","text":%b}' % dump(piece) for piece in pieces(block["text"])]
    elif kind == "tool_use":
        start = dump({**block, "input": {}})
        whole = dump(block["input"]).decode()
        deltas = [b'{"type":"input_json_delta","partial_json":%b}' % dump(piece) for piece in pieces(whole)]
    elif kind == "thinking":
        start = dump({"type": "thinking", "thinking": "", "signature": ""})
        deltas = [dump({"type": "thinking_delta", "thinking": piece}) for piece in pieces(block["thinking"])]
        deltas.append(dump({"type": "signature_delta", "signature": block["signature"]}))
    else:
        start = dump(block)
    return [_BLOCK_START % (index, start), *[_BLOCK_DELTA % (index, delta) for delta in deltas], _BLOCK_STOP % index]


def stream(call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
    usage = _usage(reply)
    begun = dump({**usage, "output_tokens": 0})
    yield _MESSAGE_START % (dump(f"msg_{call.id}"), dump(call.model), begun)
    for index, block in enumerate(blocks(reply.message.parts)):
        yield from _block_events(index, block)
    yield _MESSAGE_DELTA % (_stop_reason(reply).encode(), dump(usage))
    yield _STOP


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(status: int, code: str, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code == ThreadNotFound.code else {}
    return dump({"type": "error", "error": {"type": kind, "message": message, **details}})


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def model(name: str) -> bytes:
    return dump(_model(name))


def models(names: list[str]) -> bytes:
    data = [_model(name) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return dump({"data": data, "has_more": False, **ends})


class MessagesCodec:
    name: Dialect = "messages"
    upstream_path = "/messages"

    decode = staticmethod(decode)
    encode = staticmethod(encode)
    stream = staticmethod(stream)
    error = staticmethod(error)
    model = staticmethod(model)
    models = staticmethod(models)
    encode_request = staticmethod(messages_upstream.encode_request)
    decode_reply = staticmethod(messages_upstream.decode_reply)

    def stream_type(self, call: Call) -> str:
        return "text/event-stream"

    def opening(self, call: Call) -> bytes:
        return b""

    def keepalive(self, call: Call) -> bytes:
        return _PING

    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes:
        return frame(error(status, code, message), "error")

    def count_tokens(self, count: int) -> bytes:
        return dump({"input_tokens": count})
