"""Anthropic Messages towards a model server: the request for any call, and its answer or stream.

Such servers say nothing of tokens beyond counts, so a reply is captured as text. Thinking without a signature is left out
of a rebuilt request: the provider refuses what it did not sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollyard.core.call import Call, Finish, Reply, Sampling, TokenCount, Usage
from rollyard.core.message import Message, Opaque, Part, Text, Thinking, ToolCall, ToolSpec
from rollyard.wire import options
from rollyard.wire.body import dump, from_upstream, parse_json, read_upstream, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.messages_blocks import blocks, part_of
from rollyard.wire.parts import call_id
from rollyard.wire.toolnames import CUSTOM_SCHEMA, flat_name, in_namespaces

_MAX_TOKENS = 8192  # the dialect demands a number; this one every model takes

_MEMBERS: dict[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_tokens",),
    "stop": ("stop_sequences",),
    "tool_choice": ("tool_choice",),
    "parallel_tool_calls": ("tool_choice",),
    "reasoning": ("thinking", "output_config"),
    "response_format": ("output_config",),
}


def _sampling_members(sampling: Sampling) -> dict[str, Any]:
    out: dict[str, Any] = {"max_tokens": sampling.max_tokens if sampling.max_tokens is not None else _MAX_TOKENS}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(sampling, name)
        if value is not None:
            out[name] = value
    if sampling.stop:
        out["stop_sequences"] = list(sampling.stop)
    choice = _choice(sampling)
    if choice is not None:
        out["tool_choice"] = choice
    out.update(_thinking(sampling))
    out.update(sampling.extra)
    return out


def _choice(sampling: Sampling) -> dict[str, Any] | None:
    wanted = sampling.tool_choice
    choice: dict[str, Any] | None = None
    if wanted is not None:
        name = options.choice_name(wanted)
        value = parse_json(wanted)
        if name is not None:
            choice = {"type": "tool", "name": name}
        elif wanted in ("auto", "none", "required"):
            choice = {"type": "any" if wanted == "required" else wanted}
        elif isinstance(value, dict):
            choice = value
    if sampling.parallel_tool_calls is not None:
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": not sampling.parallel_tool_calls}
    return choice


def _thinking(sampling: Sampling) -> dict[str, Any]:
    wanted = options.reasoning(sampling)
    out: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if wanted.get("enabled") is False:
        out["thinking"] = {"type": "disabled"}
    elif isinstance(wanted.get("budget"), int):
        out["thinking"] = {"type": "enabled", "budget_tokens": wanted["budget"]}
    elif wanted.get("enabled") is True:
        out["thinking"] = {"type": "adaptive"}
    if isinstance(wanted.get("effort"), str):
        config["effort"] = wanted["effort"]
    schema = options.schema_of(sampling)
    if schema is not None:
        config["format"] = {"type": "json_schema", "schema": schema}
    if config:
        out["output_config"] = config
    return out


def encode_request(
    call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
) -> bytes:
    if call.dialect == "messages" and call.raw:
        return _patch(call, model, sampling, extra)
    messages = list(call.messages)
    body: dict[str, Any] = {"model": model}
    system: list[dict[str, Any]] = []
    while messages and messages[0].role == "system":
        system.extend({"type": "text", "text": p.text} for p in messages.pop(0).parts if isinstance(p, Text))
    if system:
        body["system"] = system[0]["text"] if len(system) == 1 else system
    body["messages"] = list(_messages(messages, keep_system=call.dialect == "messages"))
    tools = [t for t in (_tool(tool) for tool in call.tools) if t is not None]
    members = _sampling_members(sampling)
    if tools:
        body["tools"] = tools
    else:
        members.pop("tool_choice", None)
    return dump({**body, **members, **extra})


def _patch(call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    body: dict[str, Any] = dict(split_object(call.raw))
    body.pop("stream", None)
    body.pop("thread", None)  # the provider's own message ids never reach the agent, so it could not go on from one
    differs = options.find_changes(call.sampling, sampling)
    if differs:
        members = _sampling_members(sampling)
        for name in differs & _MEMBERS.keys():
            for member in _MEMBERS[name]:
                body.pop(member, None)
                if member in members:
                    body[member] = members[member]
        body.update(sampling.extra)
    body["model"] = model
    return dump({**body, **extra})


def _messages(messages: Iterable[Message], *, keep_system: bool) -> Iterable[dict[str, Any]]:
    """Tool results go into one user turn with the user message that follows them: the dialect has no tool role."""
    results: list[Any] = []
    for message in messages:
        if message.role == "tool":
            results.extend(blocks(message.parts))
            continue
        content = [block for part in message.parts if _sendable(part) for block in blocks((part,))]
        if message.role == "user":
            only = message.parts[0] if len(message.parts) == 1 and not results else None
            yield {"role": "user", "content": only.text if isinstance(only, Text) else [*results, *content]}
            results = []
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        role = "user" if message.role == "system" and not keep_system else message.role
        yield {"role": role, "content": content}
    if results:
        yield {"role": "user", "content": results}


def _sendable(part: Part) -> bool:
    if isinstance(part, Thinking):
        return part.signature is not None
    return not isinstance(part, Opaque) or part.kind.startswith("messages/")


def _tool(tool: ToolSpec) -> Any:
    if tool.kind.startswith("messages/"):
        return msgspec.Raw((tool.raw or "{}").encode())
    if tool.kind not in ("function", "custom"):
        return None
    schema = CUSTOM_SCHEMA if tool.kind == "custom" else tool.schema
    out: dict[str, Any] = {"name": flat_name(tool)}
    if tool.description:
        out["description"] = tool.description
    out["input_schema"] = {"type": "object"} if schema == "{}" else msgspec.Raw(schema.encode())
    return out


class _TokenDetails(msgspec.Struct):
    thinking_tokens: TokenCount | None = None


class _Usage(msgspec.Struct):
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cache_read_input_tokens: TokenCount | None = None
    cache_creation_input_tokens: TokenCount | None = None
    output_tokens_details: _TokenDetails | None = None


class _Answer(msgspec.Struct):
    content: list[msgspec.Raw]
    model: str | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None
    id: str | None = None


_answer = msgspec.json.Decoder(_Answer)

_FINISH: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}


def _usage(body: _Usage | None) -> Usage:
    if body is None:
        return Usage()
    prompt = body.input_tokens
    if prompt is not None:
        prompt += (body.cache_read_input_tokens or 0) + (body.cache_creation_input_tokens or 0)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=body.output_tokens,
        cached_tokens=body.cache_read_input_tokens,
        reasoning_tokens=body.output_tokens_details.thinking_tokens if body.output_tokens_details else None,
    )


def _reply(answer: _Answer, raw: bytes, call: Call | None) -> Reply:
    parts: list[Part] = []
    for block in answer.content:
        part = part_of(block)
        if isinstance(part, ToolCall) and not part.id:
            part = msgspec.structs.replace(part, id=call_id(None))
        if part is not None:
            parts.append(part)
    message = Message("assistant", tuple(parts))
    if call is not None:
        message = in_namespaces(message, call.tools)
    finish = _FINISH.get(answer.stop_reason or "end_turn", "stop")
    if finish == "stop" and message.tool_calls:
        finish = "tool_calls"
    return Reply(
        message=message,
        finish=finish,
        stop_reason=answer.stop_reason,
        usage=_usage(answer.usage),
        model=answer.model,
        engine={"id": answer.id} if answer.id else {},
        raw=raw,
        raw_dialect="messages",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    return _reply(read_upstream(_answer, body), body, call)
