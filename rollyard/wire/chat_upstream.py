"""Chat completions towards a model server: the request for any call, and its answer with the tokens it sampled.

A call that came in as chat is patched: its messages and tools go out byte for byte as the agent wrote them. The answer is
read with the fields that vLLM, SGLang and llama.cpp add to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from operator import attrgetter
from typing import Any

import msgspec

from rollyard.core.call import Call, Finish, Reply, Sampling
from rollyard.core.errors import UpstreamError
from rollyard.core.experts import read_experts
from rollyard.core.message import Image, Message, Opaque, Part, Text, Thinking, ToolCall, ToolResult, ToolSpec
from rollyard.wire import options
from rollyard.wire.body import ABSENT, dump, from_upstream, is_given, read_upstream, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.history import split_around
from rollyard.wire.openai_shapes import UsageBody, usage_of
from rollyard.wire.parts import call_id, image_url
from rollyard.wire.tokens import TokenLogprob, from_meta_info, prompt_ids, read_tokens, version_of, version_spans
from rollyard.wire.toolnames import CUSTOM_SCHEMA, custom_arguments, flat_name, in_namespaces

_LONG = 4096  # bytes of a request whose history is not read again
_DROPPED = ("stream", "stream_options", "n")
_TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
_PLAIN = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_UNCHANGED = (*_PLAIN, "max_tokens", "logprobs", "top_logprobs", "parallel_tool_calls")  # same name, same value
_unchanged = attrgetter(*_UNCHANGED)
_MEMBERS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*_PLAIN, "stop", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls")},
    "max_tokens": ("max_tokens", "max_completion_tokens"),
    "reasoning": ("reasoning_effort",),
    "response_format": ("response_format",),
    "extra": (),
}


def sampling_members(sampling: Sampling) -> dict[str, Any]:
    """Sampling as top-level members; what is unset is absent."""
    out: dict[str, Any] = {}
    for name, value in zip(_UNCHANGED, _unchanged(sampling), strict=True):
        if value is not None:
            out[name] = value
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    if sampling.tool_choice is not None:
        out["tool_choice"] = options.chat_choice(sampling.tool_choice)
    word = options.effort(sampling)
    if word is not None:
        out["reasoning_effort"] = word
    if sampling.response_format is not None:
        out["response_format"] = msgspec.Raw(sampling.response_format.encode())
    out.update(sampling.extra)
    return out


def encode_request(call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    if call.dialect == "chat" and call.raw:
        return _patch(call, model, sampling, extra)
    messages = call.messages if call.dialect == "chat" else _settle(call.messages)
    body: dict[str, Any] = {"model": model, "messages": list(_messages(messages))}
    tools = [_tool(tool) for tool in call.tools if tool.kind in ("function", "custom") or tool.kind.startswith("chat/")]
    members = sampling_members(sampling)
    if tools:
        body["tools"] = tools
    else:
        for name in _TOOL_OPTIONS:
            members.pop(name, None)
    return dump({**body, **members, **extra})


def _patch(call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    body: dict[str, Any] = {}
    if call.history is not None and len(call.raw) >= _LONG:
        body |= split_around(call.raw, "messages", call.history)
    else:
        body |= split_object(call.raw)
    for name in _DROPPED:
        body.pop(name, None)
    if not call.tools and not body.get("functions"):
        for name in _TOOL_OPTIONS:  # servers refuse an empty tool list, and a choice without tools
            body.pop(name, None)
    differs = options.find_changes(call.sampling, sampling)
    if differs:
        members = sampling_members(sampling)
        if "max_completion_tokens" in body and "max_tokens" in members:  # some models refuse the older name
            members["max_completion_tokens"] = members.pop("max_tokens")
        for name in differs:
            for member in _MEMBERS[name]:
                body.pop(member, None)
                if member in members:
                    body[member] = members[member]
        body.update(sampling.extra)
    body["model"] = model
    return dump({**body, **extra})


def _content(parts: Iterable[Part]) -> Any:
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, Text):
            blocks.append({"type": "text", "text": part.text})
        elif isinstance(part, Image):
            blocks.append({"type": "image_url", "image_url": {"url": image_url(part)}})
        elif isinstance(part, Opaque) and part.kind.startswith("chat/"):
            blocks.append(msgspec.Raw(part.json.encode()))
    if not blocks:
        return ""
    if len(blocks) == 1 and isinstance(blocks[0], dict) and blocks[0]["type"] == "text":
        return blocks[0]["text"]
    return blocks


def _settle(messages: tuple[Message, ...]) -> Iterator[Message]:
    """One system message, first; later ones as the user's. Agents of other dialects put them anywhere, and chat templates
    of common models refuse that."""
    leading = tuple(takewhile(lambda message: message.role == "system", messages))
    if leading:
        yield Message("system", tuple(part for message in leading for part in message.parts))
    for message in messages[len(leading) :]:
        yield Message("user", message.parts) if message.role == "system" else message


def _messages(messages: Iterable[Message]) -> Iterable[dict[str, Any]]:
    for message in messages:
        if message.role == "tool":
            for result in message.tool_results:
                yield _result(result)
            continue
        out: dict[str, Any] = {"role": message.role, "content": _content(message.parts)}
        if message.name is not None:
            out["name"] = message.name
        if message.role == "assistant":
            if message.thinking:
                out["reasoning_content"] = message.thinking
            if message.tool_calls:
                out["content"] = out["content"] or None
                out["tool_calls"] = [_call(tool_call) for tool_call in message.tool_calls]
        yield out


def _result(result: ToolResult) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.parts)}
    if result.name is not None:
        out["name"] = result.name
    return out


def _call(tool_call: ToolCall) -> dict[str, Any]:
    function = {"name": flat_name(tool_call), "arguments": tool_call.arguments}
    return {"id": tool_call.id, "type": "function", "function": function}


def _tool(tool: ToolSpec) -> Any:
    if tool.kind.startswith("chat/"):
        return msgspec.Raw((tool.raw or "{}").encode())
    function: dict[str, Any] = {"name": flat_name(tool)}
    if tool.description:
        function["description"] = tool.description
    schema = CUSTOM_SCHEMA if tool.kind == "custom" else tool.schema
    if schema != "{}":
        function["parameters"] = msgspec.Raw(schema.encode())
    return {"type": "function", "function": function}


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Custom(msgspec.Struct, gc=False):
    name: str = ""
    input: str = ""


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Said(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[TokenLogprob] | None = None


class _Choice(msgspec.Struct, gc=False):
    message: _Said | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    meta_info: dict[str, Any] | None = None
    routed_experts: str | None = None


class _Completion(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    model: str | None = None
    usage: UsageBody | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    id: str | None = None
    system_fingerprint: str | None = None


_completion = msgspec.json.Decoder(_Completion)

_FINISH: dict[str, Finish] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "content_filter": "refusal",
    "abort": "error",
}


def _message(body: _Said) -> Message:
    parts: list[Part] = []
    thinking = body.reasoning_content or body.reasoning
    if thinking:
        parts.append(Thinking(thinking))
    text = body.content or body.refusal
    if text:
        parts.append(Text(text))
    for call in body.tool_calls or ():
        if call.custom is not None:
            parts.append(ToolCall(call_id(call.id), call.custom.name, custom_arguments(call.custom.input)))
        elif call.function is not None:
            name, arguments = call.function.name or "", call.function.arguments or "{}"
            parts.append(ToolCall(call_id(call.id), name, arguments))
    return Message("assistant", tuple(parts))


def _reply(completion: _Completion, raw: bytes, call: Call | None, memo: Memo | None = None) -> Reply:
    if not completion.choices:
        raise UpstreamError("the model server's answer has no choices", status=502, body=raw)
    choice = completion.choices[0]
    body = choice.message or _Said()
    message = _message(body)
    if call is not None and call.tools:
        message = in_namespaces(message, call.tools)
    usage = usage_of(completion.usage)
    meta = choice.meta_info or {}
    ids, entries = choice.token_ids, choice.logprobs.content if choice.logprobs else None
    if meta and (ids is None or entries is None):
        found = from_meta_info(meta)
        if found is not None:
            ids, entries = ids or found[0], entries or found[1]
    at_top = is_given(completion.prompt_token_ids)
    prompt = prompt_ids(completion.prompt_token_ids if at_top else choice.prompt_token_ids, memo)
    tokens = read_tokens(prompt=prompt, completion=ids, entries=entries, usage=usage)
    finish = _FINISH.get(choice.finish_reason or "stop", "stop")
    if finish == "stop" and message.tool_calls:
        finish = "tool_calls"
    if body.refusal:
        finish = "refusal"
    version, spans = (version_of(meta), version_spans(meta)) if meta else (None, ())
    experts, flaws = None, tokens.flaws
    if choice.routed_experts is not None:
        try:
            experts = read_experts(choice.routed_experts)
        except ValueError as error:
            flaws = (*flaws, str(error))
    engine = {"id": completion.id, "system_fingerprint": completion.system_fingerprint}
    return Reply(
        message=message,
        finish=finish,
        stop_reason=choice.finish_reason,
        usage=usage,
        model=completion.model,
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
        tokens=tokens.tokens,
        prompt_source="engine" if tokens.prompt_ids is not None else None,
        capture=tokens.capture,
        version_start=spans[0].version if spans else version,
        version_end=spans[-1].version if spans else version,
        spans=spans,
        engine={name: value for name, value in engine.items() if value is not None},
        experts=experts,
        trainable=not flaws,
        flaws=flaws,
        raw=raw,
        raw_dialect="chat",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    return _reply(read_upstream(_completion, body), body, call, memo)
