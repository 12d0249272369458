"""OpenAI chat completions, as agents speak it: requests in, answers and SSE chunks out. `chat_upstream` is the other side.

Agents echo `reasoning_content`, re-serialise arguments and split parallel calls; nothing here repairs that. Text is
streamed from a finished reply, so a chunk is a bounded piece of it and not a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling
from rollyard.core.errors import BadRequest
from rollyard.core.message import Image, Message, Opaque, Part, Role, Text, Thinking, ToolCall, ToolResult, ToolSpec
from rollyard.core.message import tools_digest as digest_tools
from rollyard.wire import chat_upstream, openai_shapes
from rollyard.wire.body import ABSENT, WholeNumber, dump, from_agent, is_given, raw_text, read, recall, recall_same
from rollyard.wire.codec import Memo, WireRequest
from rollyard.wire.history import CHAT_HISTORY, History, read_history
from rollyard.wire.members import BodyReader, refuse_stored
from rollyard.wire.options import choice_of, reasoning_of
from rollyard.wire.parts import image_from_url, opaque, pieces
from rollyard.wire.sse import COMMENT, DONE, frame
from rollyard.wire.toolnames import custom_arguments, custom_input, custom_tools, flat_name


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _Body(msgspec.Struct, gc=False):
    messages: msgspec.Raw
    model: str = ""
    tools: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    min_p: float | None = None
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    stop: str | list[str] | None = None
    seed: WholeNumber | None = None
    n: WholeNumber | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    response_format: msgspec.Raw = ABSENT


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str = "{}"


class _Custom(msgspec.Struct, gc=False):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct, gc=False):
    id: str = ""
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT


class _ToolSpec(msgspec.Struct):
    type: str = "function"
    function: _FunctionSpec | None = None
    custom: _FunctionSpec | None = None


_body = BodyReader(_Body, "chat")
_message = msgspec.json.Decoder(_Message)
_tools = msgspec.json.Decoder(list[msgspec.Raw])
_tool = msgspec.json.Decoder(_ToolSpec)
_functions = msgspec.json.Decoder(list[_FunctionSpec])

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def _parts(content: str | list[dict[str, Any]] | None) -> tuple[Text | Image | Opaque, ...]:
    if content is None or isinstance(content, str):
        return (Text(content),) if content else ()
    parts: list[Text | Image | Opaque] = []
    for block in content:
        kind = block.get("type")
        text = block.get("text")
        if kind in ("text", "input_text", "output_text") and isinstance(text, str):
            if text:
                parts.append(Text(text))
        elif kind == "refusal" and isinstance(block.get("refusal"), str):
            parts.append(Text(block["refusal"]))
        elif kind == "image_url":
            url = block.get("image_url")
            url = url.get("url") if isinstance(url, dict) else url
            if not isinstance(url, str):
                raise BadRequest("messages: an image_url part has no url")
            parts.append(image_from_url(url))
        elif isinstance(kind, str):
            refuse_stored(kind, block)
            parts.append(opaque("chat", kind, block))
        else:
            raise BadRequest("messages: a content part has no type")
    return tuple(parts)


def _calls(item: _Message) -> Iterator[ToolCall]:
    for call in item.tool_calls or ():
        if call.function is not None:
            yield ToolCall(call.id, call.function.name, call.function.arguments)
        elif call.custom is not None:
            yield ToolCall(call.id, call.custom.name, custom_arguments(call.custom.input))
        else:
            raise BadRequest("messages: a tool call has neither function nor custom")
    if item.function_call is not None:
        yield ToolCall(item.function_call.name, item.function_call.name, item.function_call.arguments)


def _history_item(raw: msgspec.Raw) -> Message:
    item = read(_message, raw, "messages")
    role = _ROLES.get(item.role)
    if role is None:
        raise BadRequest(f"messages: unknown role {item.role[:40]!r}")
    parts = _parts(item.content)
    if role == "tool":
        call_id = item.tool_call_id or item.name
        if call_id is None:
            raise BadRequest("messages: a tool message has no tool_call_id")
        return Message("tool", (ToolResult(call_id, parts, name=item.name),))
    if role != "assistant":
        return Message(role, parts, item.name)
    whole: list[Part] = []
    thinking = item.reasoning_content or item.reasoning
    if thinking:
        whole.append(Thinking(thinking))
    whole.extend(parts or ((Text(item.refusal),) if item.refusal else ()))
    whole.extend(_calls(item))
    return Message("assistant", tuple(whole), item.name)


def _recall_item(memo: Memo, raw: msgspec.Raw) -> Message:
    return recall(memo, b"chat messages", raw, _history_item)


def _spec(function: _FunctionSpec, kind: str = "function", raw: str | None = None) -> ToolSpec:
    schema = raw_text(function.parameters, "tools") if is_given(function.parameters) else "{}"
    return ToolSpec(function.name, function.description or "", schema, kind=kind, raw=raw)


def _tool_specs(raw: msgspec.Raw) -> tuple[tuple[ToolSpec, ...], bytes]:
    specs: list[ToolSpec] = []
    for item in read(_tools, raw, "tools"):
        tool = read(_tool, item, "tools")
        if tool.function is not None and tool.type == "function":
            specs.append(_spec(tool.function))
        elif tool.custom is not None and tool.type == "custom":
            specs.append(_spec(tool.custom, "custom", raw_text(item, "tools")))
        else:
            specs.append(ToolSpec(tool.type, kind=f"chat/{tool.type}", raw=raw_text(item, "tools")))
    return tuple(specs), digest_tools(tuple(specs))


def _function_specs(raw: msgspec.Raw) -> tuple[tuple[ToolSpec, ...], bytes]:
    specs = tuple(_spec(function) for function in read(_functions, raw, "functions"))
    return specs, digest_tools(specs)


def _sampling(body: _Body) -> Sampling:
    stop = body.stop
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=reasoning_of(effort=body.reasoning_effort),
        response_format=raw_text(body.response_format) if is_given(body.response_format) else None,
    )


class _Settings(NamedTuple):
    """What a request says beside its messages."""

    model: str
    tools: tuple[ToolSpec, ...]
    tools_digest: bytes
    sampling: Sampling
    stream: bool
    include_usage: bool


def _read_settings(memo: Memo, body: _Body) -> _Settings:
    if body.n is not None and body.n != 1:
        raise BadRequest("n: one choice per call is answered")
    tools: tuple[ToolSpec, ...] = ()
    tools_digest = b""
    if is_given(body.tools):
        tools, tools_digest = recall_same(memo, b"chat tools", body.tools, _tool_specs)
    elif is_given(body.functions):
        tools, tools_digest = recall(memo, b"chat functions", body.functions, _function_specs)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return _Settings(body.model, tools, tools_digest, _sampling(body), bool(body.stream), usage)


_history = History(CHAT_HISTORY, "messages", _recall_item, _read_settings)


@from_agent
def decode(request: WireRequest, memo: Memo | None = None) -> Call:
    memo = {} if memo is None else memo
    settings, messages, place = read_history(_body, request.body, memo, _history)
    return Call(
        id=request.call_id,
        rollout_id=request.rollout_id,
        dialect="chat",
        model=settings.model,
        messages=messages,
        tools=settings.tools,
        tools_digest=settings.tools_digest,
        sampling=settings.sampling,
        stream=settings.stream,
        include_usage=settings.include_usage,
        raw=request.body,
        history=place,
        headers=request.headers,
        received_at=request.received_at,
    )


def _finish(reply: Reply) -> bytes:
    if reply.finish == "length":
        return b"length"
    if reply.finish == "refusal":
        return b"content_filter"
    return b"tool_calls" if reply.message.tool_calls else b"stop"


def _wire_call(tool_call: ToolCall, customs: set[tuple[str | None, str]]) -> dict[str, Any]:
    name = flat_name(tool_call)
    if (tool_call.namespace, tool_call.name) in customs:
        return {
            "id": tool_call.id,
            "type": "custom",
            "custom": {"name": name, "input": custom_input(tool_call.arguments)},
        }
    return {"id": tool_call.id, "type": "function", "function": {"name": name, "arguments": tool_call.arguments}}


_ANSWER = (
    b'{"id":%b,"object":"chat.completion","created":%d,"model":%b,"choices":[{"index":0,"message":%b,"logprobs":%b,'
    b'"finish_reason":"%b"}],"usage":%b}'
)
_CHUNK_HEAD = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,%b'
_CHUNK = b'%b"choices":[{"index":0,"delta":%b,"logprobs":%b,"finish_reason":%b}]}\n\n'


def _logprobs(call: Call, reply: Reply) -> bytes:
    shown = openai_shapes.logprobs(call, reply)
    return dump({"content": shown, "refusal": None}) if shown else b"null"


def encode(call: Call, reply: Reply) -> bytes:
    message = reply.message
    text = message.text
    tool_calls = message.tool_calls
    body: dict[str, Any] = {"role": "assistant", "content": text if text or not tool_calls else None}
    body["refusal"] = text if reply.finish == "refusal" else None
    if thinking := message.thinking:
        body["reasoning_content"] = thinking
    if tool_calls:
        customs = custom_tools(call.tools)
        body["tool_calls"] = [_wire_call(tool_call, customs) for tool_call in tool_calls]
    return _ANSWER % (
        dump(f"chatcmpl-{call.id}"),
        int(call.received_at),
        dump(call.model),
        dump(body),
        _logprobs(call, reply),
        _finish(reply),
        openai_shapes.chat_usage(reply),
    )


def _deltas(call: Call, reply: Reply) -> Iterator[bytes]:
    """What follows the role, as JSON."""
    message = reply.message
    text = message.text
    for piece in pieces(message.thinking):
        yield b'{"reasoning_content":%b}' % dump(piece)
    for piece in pieces(text):
        yield b'{"content":%b}' % dump(piece)
    if reply.finish == "refusal":
        for piece in pieces(text):
            yield b'{"refusal":%b}' % dump(piece)
    tool_calls = message.tool_calls
    if not tool_calls:
        return
    customs = custom_tools(call.tools)
    for index, tool_call in enumerate(tool_calls):
        head = _wire_call(tool_call, customs)
        field, key = ("custom", "input") if "custom" in head else ("function", "arguments")
        whole: str = head[field][key]
        first, *rest = pieces(whole) if whole else ("",)
        head[field][key] = first
        yield dump({"tool_calls": [{"index": index, **head}]})
        for piece in rest:
            yield dump({"tool_calls": [{"index": index, field: {key: piece}}]})


def stream(call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
    usage = b'"usage":null,' if call.include_usage else b""
    id, created, model = dump(f"chatcmpl-{call.id}"), int(call.received_at), dump(call.model)
    head = _CHUNK_HEAD % (id, created, model, usage)
    yield _CHUNK % (head, b'{"role":"assistant","content":""}', b"null", b"null")
    logprobs = _logprobs(call, reply)
    for delta in _deltas(call, reply):
        yield _CHUNK % (head, delta, logprobs, b"null")
        logprobs = b"null"
    yield _CHUNK % (head, b"{}", logprobs, b'"%b"' % _finish(reply))
    if call.include_usage:
        usage = b'"usage":%b,' % openai_shapes.chat_usage(reply)
        yield _CHUNK_HEAD % (id, created, model, usage) + b'"choices":[]}\n\n'
    yield DONE


class ChatCodec:
    name: Dialect = "chat"
    upstream_path = "/chat/completions"

    decode = staticmethod(decode)
    encode = staticmethod(encode)
    stream = staticmethod(stream)
    error = staticmethod(openai_shapes.error)
    model = staticmethod(openai_shapes.model)
    models = staticmethod(openai_shapes.models)
    encode_request = staticmethod(chat_upstream.encode_request)
    decode_reply = staticmethod(chat_upstream.decode_reply)

    def stream_type(self, call: Call) -> str:
        return "text/event-stream"

    def opening(self, call: Call) -> bytes:
        return b""

    def keepalive(self, call: Call) -> bytes:
        return COMMENT

    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes:
        # agents decide by the words of the message whether to try again: the status is one of them
        return frame(openai_shapes.error(status, code, f"{status} {code}: {message}"))

    def count_tokens(self, count: int) -> bytes:
        return dump({"object": "token_count", "input_tokens": count})
