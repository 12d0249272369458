"""Chat completions towards a model server: the request for any call, and its answer with the tokens it sampled.

A call that came in as chat is patched: its messages and tools go out byte for byte as the agent wrote them. The answer is
read with the fields that vLLM, SGLang and llama.cpp add to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from rollyard.core.call import Call, Finish, Reply, Sampling
from rollyard.core.errors import UpstreamError
from rollyard.core.experts import read_experts
from rollyard.core.message import Image, Message, Opaque, Part, Text, Thinking, ToolCall, ToolResult, ToolSpec
from rollyard.wire import options
from rollyard.wire.body import ABSENT, dump, from_upstream, is_given, malformed, read_upstream, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.history import MARK, split_around
from rollyard.wire.openai_shapes import UsageBody, usage_of
from rollyard.wire.parts import call_id, image_url
from rollyard.wire.tokens import (
    TokenLogprob,
    cut_prompt,
    from_meta_info,
    prompt_ids,
    read_tokens,
    version_of,
    version_spans,
)
from rollyard.wire.toolnames import CUSTOM_SCHEMA, custom_arguments, flat_name, in_namespaces

_WRAPPING, _OTHERS = b"chat wrapping", b"chat other members"  # keys in a memo
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


def encode_request(
    call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
) -> bytes:
    if call.dialect == "chat" and call.raw:
        if memo is None or call.history is None:
            return _patch(call, model, sampling, extra)
        return _wrap(call, model, sampling, extra, memo, call.history)
    messages = call.messages if call.dialect == "chat" else _join_system_messages(call.messages)
    body: dict[str, Any] = {"model": model, "messages": list(_messages(messages))}
    tools = [_tool(tool) for tool in call.tools if tool.kind in ("function", "custom") or tool.kind.startswith("chat/")]
    if tools:
        body["tools"] = tools
    if memo is None:
        return dump({**body, **_other_members(sampling, extra, tools=bool(tools))})
    key = sampling, extra, bool(tools)
    known: tuple[Any, bytes] | None = memo.get(_OTHERS)
    if known is None or known[0] != key:
        others = _other_members(sampling, extra, tools=bool(tools))
        if not others or not others.keys().isdisjoint(body):
            return dump({**body, **others})
        known = memo[_OTHERS] = key, dump(others)
    return b"%b,%b" % (dump(body)[:-1], known[1][1:])


def _other_members(sampling: Sampling, extra: Mapping[str, Any], *, tools: bool) -> dict[str, Any]:
    """Of a request, beside its model, messages and tools."""
    members = sampling_members(sampling)
    if not tools:
        for name in _TOOL_OPTIONS:
            members.pop(name, None)
    return {**members, **extra}


class _Wrapping(NamedTuple):
    """What stands before and after the history of a request, and of what is sent for it."""

    asked: tuple[Any, ...]
    before: bytes
    after: bytes
    sent_before: bytes
    sent_after: bytes


def _wrap(
    call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo, place: tuple[int, int]
) -> bytes:
    """As `_patch`, but what surrounds the history is patched once: it says the same whatever that holds."""
    raw, (start, end) = call.raw, place
    key = model, sampling, extra, call.sampling, bool(call.tools)
    known: _Wrapping | None = memo.get(_WRAPPING)
    if (
        known is None
        or len(known.before) != start
        or len(known.after) != len(raw) - end
        or not raw.startswith(known.before)
        or not raw.endswith(known.after)
        or known.asked != key
    ):
        around = split_around(raw, "messages", place)
        if around is None:
            return _patch(call, model, sampling, extra)
        patched = _patch_members(dict(around), call, model, sampling, extra)
        before, found, after = patched.partition(MARK)
        if not found:  # the operator's own members stand in its place
            return patched
        known = memo[_WRAPPING] = _Wrapping(key, raw[:start], raw[end:], before, after)
    return b"".join((known.sent_before, memoryview(raw)[start:end], known.sent_after))


def _patch(call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    return _patch_members(dict(split_object(call.raw)), call, model, sampling, extra)


def _patch_members(body: dict[str, Any], call: Call, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
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


def _join_system_messages(messages: tuple[Message, ...]) -> Iterator[Message]:
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


def _prompt(completion: _Completion) -> msgspec.Raw:
    if is_given(completion.prompt_token_ids) or not completion.choices:
        return completion.prompt_token_ids
    return completion.choices[0].prompt_token_ids


def _read(body: bytes, memo: Memo | None) -> tuple[_Completion, array[int] | None]:
    """A server's answer, and the ids of its prompt."""
    if memo is not None and (cut := cut_prompt(body, memo)) is not None:
        try:
            completion = _completion.decode(cut.short)
            if (found := cut.prompt_ids(_prompt(completion), memo)) is not None:
                return completion, found
        except malformed:  # said better by what reads it whole
            pass
    completion = read_upstream(_completion, body)
    return completion, prompt_ids(_prompt(completion), memo)


def _reply(completion: _Completion, raw: bytes, call: Call | None, prompt: array[int] | None) -> Reply:
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
    engine: dict[str, Any] = {}
    if completion.id is not None:
        engine["id"] = completion.id
    if completion.system_fingerprint is not None:
        engine["system_fingerprint"] = completion.system_fingerprint
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
        engine=engine,
        experts=experts,
        trainable=not flaws,
        flaws=flaws,
        raw=raw,
        raw_dialect="chat",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    completion, prompt = _read(body, memo)
    return _reply(completion, body, call, prompt)
