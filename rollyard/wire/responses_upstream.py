"""OpenAI Responses towards a model server: the request for any call, and its answer or stream.

Reasoning that no provider sealed is left out of a rebuilt request: the provider looks such items up by id and refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollyard.core.call import Call, Finish, Reply, Sampling
from rollyard.core.errors import UpstreamError
from rollyard.core.message import Message, Opaque, Part, Text, Thinking, ToolCall, ToolSpec
from rollyard.wire import options
from rollyard.wire.body import dump, from_upstream, parse_json, read_upstream, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.openai_shapes import UsageBody, usage_of
from rollyard.wire.parts import call_id
from rollyard.wire.responses_items import assistant_items, content_blocks, message_of
from rollyard.wire.tokens import TokenLogprob, read_tokens
from rollyard.wire.toolnames import custom_tools, in_namespaces

_LOGPROBS = "message.output_text.logprobs"
_MEMBERS: dict[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "max_tokens": ("max_output_tokens",),
    "top_logprobs": ("top_logprobs",),
    "tool_choice": ("tool_choice",),
    "parallel_tool_calls": ("parallel_tool_calls",),
    "reasoning": ("reasoning",),
    "response_format": ("text",),
}


def _sampling_members(sampling: Sampling) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_logprobs", "parallel_tool_calls"):
        value = getattr(sampling, name)
        if value is not None:
            out[name] = value
    if sampling.max_tokens is not None:
        out["max_output_tokens"] = sampling.max_tokens
    if sampling.logprobs:
        out["include"] = [_LOGPROBS]
    if sampling.tool_choice is not None:
        name = options.choice_name(sampling.tool_choice)
        out["tool_choice"] = {"type": "function", "name": name} if name else options.chat_choice(sampling.tool_choice)
    wanted = options.reasoning(sampling)
    reasoning = {name: wanted[name] for name in ("effort", "summary") if isinstance(wanted.get(name), str)}
    if reasoning:
        out["reasoning"] = reasoning
    form = options.format_of(sampling)
    if form is not None:
        inner = form.get("json_schema")
        flat = {**inner, "type": "json_schema"} if isinstance(inner, dict) else form
        out["text"] = {"format": flat}
    out.update(sampling.extra)
    return out


def encode_request(
    call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
) -> bytes:
    if call.dialect == "responses" and call.raw:
        return _patch(call, model, sampling, extra)
    customs = custom_tools(call.tools)
    body: dict[str, Any] = {"model": model, "store": False, "input": list(_input(call.messages, customs))}
    tools = list(_tools(call.tools))
    members = _sampling_members(sampling)
    if tools:
        body["tools"] = tools
    else:
        for name in ("tool_choice", "parallel_tool_calls"):
            members.pop(name, None)
    return dump({**body, **members, **extra})


def _patch(call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    body: dict[str, Any] = dict(split_object(call.raw))
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    differs = options.find_changes(call.sampling, sampling)
    if differs:
        members = _sampling_members(sampling)
        for name in differs & _MEMBERS.keys():
            for member in _MEMBERS[name]:
                body.pop(member, None)
                if member in members:
                    body[member] = members[member]
        if "logprobs" in differs:
            sent = parse_json(bytes(body["include"])) if "include" in body else None
            others = [name for name in (sent or ()) if name != _LOGPROBS]
            body["include"] = [*others, _LOGPROBS] if sampling.logprobs else others
        body.update(sampling.extra)
    body["model"] = model
    return dump({**body, **extra})


def _input(messages: Iterable[Message], customs: set[tuple[str | None, str]]) -> Iterable[Any]:
    custom_ids: set[str] = set()
    for number, message in enumerate(messages):
        if message.role == "assistant":
            custom_ids.update(c.id for c in message.tool_calls if (c.namespace, c.name) in customs)
            yield from assistant_items(tuple(p for p in message.parts if _sendable(p)), customs, str(number))
        elif message.role == "tool":
            for result in message.tool_results:
                only = result.parts[0] if len(result.parts) == 1 else None
                kind = "custom_tool_call_output" if result.call_id in custom_ids else "function_call_output"
                output = only.text if isinstance(only, Text) else content_blocks(result.parts, "input_text")
                yield {"type": kind, "call_id": result.call_id, "output": output}
        elif message.role == "user" and _is_item(message):
            yield from content_blocks(message.parts, "input_text")
        else:
            content = content_blocks(message.parts, "input_text")
            yield {"type": "message", "role": message.role, "content": content}


def _is_item(message: Message) -> bool:
    """An output item of some tool that is carried whole."""
    only = message.parts[0] if len(message.parts) == 1 else None
    return isinstance(only, Opaque) and only.kind.startswith("responses/") and only.kind.endswith("_output")


def _sendable(part: Part) -> bool:
    return not isinstance(part, Thinking) or part.signature is not None


def _tools(tools: tuple[ToolSpec, ...]) -> Iterable[Any]:
    namespaces: dict[str, list[Any]] = {}
    for tool in tools:
        if tool.kind.startswith("responses/") or (tool.kind == "custom" and tool.raw):
            spec: Any = msgspec.Raw((tool.raw or "{}").encode())
        elif tool.kind in ("function", "custom"):
            spec = {"type": tool.kind, "name": tool.name, "description": tool.description}
            if tool.kind == "function":
                spec["parameters"] = msgspec.Raw(tool.schema.encode())
        else:
            continue
        if tool.namespace is None:
            yield spec
        elif tool.namespace in namespaces:
            namespaces[tool.namespace].append(spec)
        else:
            inner = namespaces[tool.namespace] = [spec]
            yield {"type": "namespace", "name": tool.namespace, "description": "", "tools": inner}


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    output: list[msgspec.Raw]
    model: str | None = None
    status: str | None = None
    incomplete_details: _Incomplete | None = None
    usage: UsageBody | None = None
    id: str | None = None
    error: dict[str, Any] | None = None


class _Content(msgspec.Struct):
    type: str = ""
    logprobs: list[TokenLogprob] | None = None


class _Output(msgspec.Struct):
    type: str = ""
    content: list[_Content] | None = None


_response = msgspec.json.Decoder(_Response)
_output = msgspec.json.Decoder(_Output)


def _finish(response: _Response, message: Message, refused: bool) -> Finish:
    reason = response.incomplete_details.reason if response.incomplete_details else None
    if reason == "max_output_tokens":
        return "length"
    if reason == "content_filter" or refused:
        return "refusal"
    return "tool_calls" if message.tool_calls else "stop"


def _parts(output: list[msgspec.Raw]) -> Iterable[Part]:
    for raw in output:
        found = message_of(raw)
        for part in found.parts if isinstance(found, Message) else found:
            if isinstance(part, ToolCall) and not part.id:
                part = msgspec.structs.replace(part, id=call_id(None))
            yield part


def _reply(response: _Response, raw: bytes, call: Call | None) -> Reply:
    if response.status == "failed":
        said = (response.error or {}).get("message")
        raise UpstreamError(f"the model server failed: {said}", status=502, body=raw)
    message = Message("assistant", tuple(_parts(response.output)))
    if call is not None:
        message = in_namespaces(message, call.tools)
    contents = [c for raw_item in response.output for c in read_upstream(_output, bytes(raw_item)).content or ()]
    entries = [entry for content in contents for entry in content.logprobs or ()]
    usage = usage_of(response.usage)
    tokens = read_tokens(prompt=None, completion=None, entries=entries or None, usage=usage)
    return Reply(
        message=message,
        finish=_finish(response, message, any(content.type == "refusal" for content in contents)),
        stop_reason=response.incomplete_details.reason if response.incomplete_details else response.status,
        usage=usage,
        model=response.model,
        logprobs=tokens.logprobs,
        tokens=tokens.tokens,
        capture=tokens.capture,
        engine={"id": response.id} if response.id else {},
        trainable=not tokens.flaws,
        flaws=tokens.flaws,
        raw=raw,
        raw_dialect="responses",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    return _reply(read_upstream(_response, body), body, call)
