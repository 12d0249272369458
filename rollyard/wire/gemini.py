"""Gemini generateContent and streamGenerateContent, as agents speak it. `gemini_upstream` is the other side.

Model and streaming are in the path; a stream is SSE with `alt=sse`, else one JSON array. A comment line breaks real
clients of this dialect (they read the answer, throw it away and ask again): keepalives are frames with an empty text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling
from rollyard.core.errors import BadRequest
from rollyard.core.message import Message, Text, ToolSpec
from rollyard.core.message import tools_digest as digest_tools
from rollyard.wire import gemini_upstream
from rollyard.wire.body import ABSENT, WholeNumber, dump, from_agent, is_given, raw_text, read, read_object, recall
from rollyard.wire.codec import Memo, WireRequest
from rollyard.wire.gemini_parts import content_decoder, messages_of, parts_of, wire_parts
from rollyard.wire.members import BodyReader
from rollyard.wire.openai_shapes import counts
from rollyard.wire.options import name_choice, reasoning_of, text_of
from rollyard.wire.parts import pieces
from rollyard.wire.sse import frame

T = TypeVar("T")


class _Thinking(msgspec.Struct, rename="camel"):
    thinking_budget: WholeNumber | None = None
    thinking_level: str | None = None
    include_thoughts: bool | None = None


class _Config(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: WholeNumber | None = None
    stop_sequences: list[str] | None = None
    seed: WholeNumber | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = None
    logprobs: WholeNumber | None = None
    candidate_count: WholeNumber | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: _Thinking | None = None


class _Calling(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _Calling | None = None


class _Body(msgspec.Struct, rename="camel"):
    contents: list[msgspec.Raw] | None = None
    system_instruction: msgspec.Raw = ABSENT
    system_instruction_snake: msgspec.Raw = msgspec.field(name="system_instruction", default=ABSENT)
    tools: msgspec.Raw = ABSENT
    tool_config: msgspec.Raw = ABSENT
    tool_config_snake: msgspec.Raw = msgspec.field(name="tool_config", default=ABSENT)
    generation_config: msgspec.Raw = ABSENT
    generation_config_snake: msgspec.Raw = msgspec.field(name="generation_config", default=ABSENT)
    generate_content_request: msgspec.Raw = ABSENT


class _Function(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    parameters_json_schema: msgspec.Raw = ABSENT
    parameters_json_schema_snake: msgspec.Raw = msgspec.field(name="parameters_json_schema", default=ABSENT)


class _Tool(msgspec.Struct, rename="camel"):
    function_declarations: list[_Function] | None = None
    function_declarations_snake: list[_Function] | None = msgspec.field(name="function_declarations", default=None)


_body = BodyReader(_Body, "gemini")
_config = msgspec.json.Decoder(_Config)
_tool_config = msgspec.json.Decoder(_ToolConfig)
_tools = msgspec.json.Decoder(list[msgspec.Raw])
_tool = msgspec.json.Decoder(_Tool)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _options(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], kind: type[T]) -> T | None:
    """A small object of options, in either case of its names."""
    if not is_given(raw):
        return None
    if b"_" not in bytes(raw):
        return read(decoder, raw, kind.__name__)
    return msgspec.convert(_camel_names(read_object(raw)), kind)


def _camel_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {_camel(n): inner if "chema" in n else _camel_names(inner) for n, inner in value.items()}


def json_schema(schema: Any, *, names: bool = False) -> Any:
    """An OpenAPI schema (`"type": "OBJECT"`, `any_of`) as JSON Schema. `names`: the keys are property names."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if not names and key == "type" and isinstance(value, str):
            out[key] = value.lower()
        else:
            out[key if names else _camel(key)] = json_schema(value, names=not names and key == "properties")
    return out


def _spec(function: _Function) -> ToolSpec:
    schema = "{}"
    given_schema = function.parameters_json_schema
    if not is_given(given_schema):
        given_schema = function.parameters_json_schema_snake
    if is_given(given_schema):
        schema = raw_text(given_schema, "tools")
    elif is_given(function.parameters):
        schema = text_of(json_schema(read_object(function.parameters, "tools")))
    return ToolSpec(function.name, function.description or "", schema)


def _tool_specs(raw: msgspec.Raw) -> tuple[tuple[ToolSpec, ...], bytes]:
    specs: list[ToolSpec] = []
    for item in read(_tools, raw, "tools"):
        tool = read(_tool, item, "tools")
        functions = tool.function_declarations or tool.function_declarations_snake
        if functions is not None:
            specs.extend(_spec(function) for function in functions)
            continue
        kind = next(iter(read_object(item, "tools")), "empty")
        specs.append(ToolSpec(kind, kind=f"gemini/{kind}", raw=raw_text(item, "tools")))
    return tuple(specs), digest_tools(tuple(specs))


def _system(raw: msgspec.Raw) -> tuple[Message, ...]:
    content = read(content_decoder, raw, "systemInstruction")
    parts = tuple(part for item in content.parts or () for part in parts_of(item) if isinstance(part, Text))
    return (Message("system", parts),) if parts else ()


def _choice(config: _ToolConfig | None) -> str | None:
    calling = config.function_calling_config if config else None
    if calling is None or calling.mode is None:
        return None
    names = calling.allowed_function_names or []
    if calling.mode == "ANY" and len(names) == 1:
        return name_choice(names[0])
    return {"AUTO": "auto", "ANY": "required", "NONE": "none"}.get(calling.mode)


def _response_format(config: _Config) -> str | None:
    if config.response_mime_type != "application/json":
        return None
    schema = config.response_json_schema or json_schema(config.response_schema)
    if schema is None:
        return text_of({"type": "json_object"})
    return text_of({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})


def _reasoning(thinking: _Thinking | None) -> str | None:
    if thinking is None:
        return None
    return reasoning_of(
        enabled=False if thinking.thinking_budget == 0 else None,
        budget=thinking.thinking_budget or None,
        effort=thinking.thinking_level.lower() if thinking.thinking_level else None,
        display=thinking.include_thoughts,
    )


def _sampling(body: _Body) -> Sampling:
    raw = body.generation_config if is_given(body.generation_config) else body.generation_config_snake
    config = _options(raw, _config, _Config) or _Config()
    if config.candidate_count is not None and config.candidate_count != 1:
        raise BadRequest("generationConfig.candidateCount: one candidate per call is answered")
    calling = body.tool_config if is_given(body.tool_config) else body.tool_config_snake
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=int(config.top_k) if config.top_k is not None else None,
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        seed=config.seed,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=config.response_logprobs,
        top_logprobs=config.logprobs,
        tool_choice=_choice(_options(calling, _tool_config, _ToolConfig)),
        reasoning=_reasoning(config.thinking_config),
        response_format=_response_format(config),
    )


@from_agent
def decode(request: WireRequest, memo: Memo | None = None) -> Call:
    body = _body.read(request.body)
    if is_given(body.generate_content_request):  # countTokens may wrap a whole request
        body = _body.read(bytes(body.generate_content_request))
    if body.contents is None:
        raise BadRequest("contents: missing")
    memo = {} if memo is None else memo
    messages: list[Message] = []
    system = body.system_instruction if is_given(body.system_instruction) else body.system_instruction_snake
    if is_given(system):
        messages.extend(recall(memo, b"gemini system", system, _system))
    for raw in body.contents:
        messages.extend(recall(memo, b"gemini contents", raw, messages_of))
    tools: tuple[ToolSpec, ...] = ()
    tools_digest = b""
    if is_given(body.tools):
        tools, tools_digest = recall(memo, b"gemini tools", body.tools, _tool_specs)
    return Call(
        id=request.call_id,
        rollout_id=request.rollout_id,
        dialect="gemini",
        model=(request.model or "").removeprefix("models/"),
        messages=tuple(messages),
        tools=tools,
        tools_digest=tools_digest,
        sampling=_sampling(body),
        stream=bool(request.stream),
        framing=request.framing,
        include_usage=True,
        raw=request.body,
        headers=request.headers,
        received_at=request.received_at,
    )


def _finish(reply: Reply) -> str:
    return {"length": "MAX_TOKENS", "refusal": "SAFETY"}.get(reply.finish, "STOP")


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, completion = counts(reply)
    thoughts = min(reply.usage.reasoning_tokens or 0, completion)
    usage: dict[str, Any] = {"promptTokenCount": prompt, "candidatesTokenCount": completion - thoughts}
    if reply.usage.reasoning_tokens is not None:
        usage["thoughtsTokenCount"] = thoughts
    if reply.usage.cached_tokens is not None:
        usage["cachedContentTokenCount"] = reply.usage.cached_tokens
    usage["totalTokenCount"] = prompt + completion
    return usage


def _logprobs(call: Call, reply: Reply) -> dict[str, Any]:
    if not call.sampling.logprobs or not reply.tokens:
        return {}
    ids = reply.completion_ids
    if ids is None or len(ids) != len(reply.tokens):
        ids = None
    chosen: list[dict[str, Any]] = []
    for index, token in enumerate(reply.tokens):
        entry: dict[str, Any] = {"token": token.text, "logProbability": token.logprob}
        chosen.append(entry if ids is None else {**entry, "tokenId": ids[index]})
    tops = [
        {"candidates": [{"token": text, "logProbability": value} for text, value in token.top]}
        for token in reply.tokens
    ]
    return {"logprobsResult": {"chosenCandidates": chosen, "topCandidates": tops}}


def _answer(call: Call, parts: list[Any], **fields: Any) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": parts}, "index": 0, **fields}
    return {"candidates": [candidate], "modelVersion": call.model, "responseId": call.id}


def encode(call: Call, reply: Reply) -> bytes:
    parts = list(wire_parts(reply.message.parts))
    body = _answer(call, parts or [{"text": ""}], finishReason=_finish(reply), **_logprobs(call, reply))
    body["usageMetadata"] = _usage(reply)
    return dump(body)


def _chunks(call: Call, reply: Reply) -> Iterator[bytes]:
    """One part, or a bounded piece of one, per chunk; the last one tells how it ended."""
    held: Any = {"text": ""}
    first = True
    for part in wire_parts(reply.message.parts):
        if isinstance(part, dict) and part.get("text"):
            whole: str = part["text"]
            split: list[Any] = [{**part, "text": piece} for piece in pieces(whole)]
            for piece in split[:-1]:
                piece.pop("thoughtSignature", None)
        else:
            split = [part]
        for piece in split:
            if not first:
                yield dump(_answer(call, [held]))
            held, first = piece, False
    last = _answer(call, [held], finishReason=_finish(reply), **_logprobs(call, reply))
    last["usageMetadata"] = _usage(reply)
    yield dump(last)


def stream(call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
    if call.framing == "sse":
        for chunk in _chunks(call, reply):
            yield frame(chunk)
        return
    separator = b"" if opened else b"["
    for chunk in _chunks(call, reply):
        yield separator + chunk
        separator = b",\r\n"
    yield b"]"


_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error(status: int, code: str, message: str) -> bytes:
    word = _STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return dump({"error": {"code": status, "message": message, "status": word}})


def _model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}


def model(name: str) -> bytes:
    return dump(_model(name))


def models(names: list[str]) -> bytes:
    return dump({"models": [_model(name) for name in names]})


class GeminiCodec:
    name: Dialect = "gemini"
    upstream_path = "/models/{model}:generateContent"

    decode = staticmethod(decode)
    encode = staticmethod(encode)
    stream = staticmethod(stream)
    error = staticmethod(error)
    model = staticmethod(model)
    models = staticmethod(models)
    encode_request = staticmethod(gemini_upstream.encode_request)
    decode_reply = staticmethod(gemini_upstream.decode_reply)

    def stream_type(self, call: Call) -> str:
        return "text/event-stream" if call.framing == "sse" else "application/json"

    def opening(self, call: Call) -> bytes:
        return b"" if call.framing == "sse" else b"["

    def keepalive(self, call: Call) -> bytes:
        if call.framing == "array":
            return b"\n"
        return frame(dump(_answer(call, [{"text": ""}])))

    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes:
        body = error(status, code, message)
        return frame(body) if call.framing == "sse" else body + b"]"

    def count_tokens(self, count: int) -> bytes:
        return dump({"totalTokens": count})
