"""Gemini towards a model server: the request for any call, and its answer or stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollyard.core.call import Call, Finish, Reply, Sampling, TokenCount, Usage
from rollyard.core.errors import UpstreamError
from rollyard.core.message import Message, Part, Text, Thinking, ToolCall, ToolSpec
from rollyard.wire import options
from rollyard.wire.body import dump, from_upstream, is_given, read_upstream, split_object
from rollyard.wire.codec import Memo
from rollyard.wire.gemini_parts import parts_of, wire_parts
from rollyard.wire.parts import call_id
from rollyard.wire.tokens import TokenLogprob, TopLogprob, read_tokens
from rollyard.wire.toolnames import CUSTOM_SCHEMA, flat_name, in_namespaces

_CONFIG = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "max_tokens": "maxOutputTokens",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "logprobs": "responseLogprobs",
    "top_logprobs": "logprobs",
}
_MODES = {"auto": "AUTO", "required": "ANY", "none": "NONE"}
_IN_CONFIG: dict[str, tuple[str, ...]] = {
    **{name: (member,) for name, member in _CONFIG.items()},
    "stop": ("stopSequences",),
    "reasoning": ("thinkingConfig",),
    "response_format": ("responseMimeType", "responseJsonSchema", "responseSchema"),
}


def _config(sampling: Sampling) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, member in _CONFIG.items():
        value = getattr(sampling, name)
        if value is not None:
            out[member] = value
    if sampling.stop:
        out["stopSequences"] = list(sampling.stop)
    if sampling.response_format is not None:
        out["responseMimeType"] = "application/json"
        schema = options.schema_of(sampling)
        if schema is not None:
            out["responseJsonSchema"] = schema
    thinking = _thinking(sampling)
    if thinking:
        out["thinkingConfig"] = thinking
    return out


def _thinking(sampling: Sampling) -> dict[str, Any]:
    wanted = options.reasoning(sampling)
    out: dict[str, Any] = {}
    if wanted.get("enabled") is False:
        out["thinkingBudget"] = 0
    elif isinstance(wanted.get("budget"), int):
        out["thinkingBudget"] = wanted["budget"]
    elif isinstance(wanted.get("effort"), str):
        out["thinkingLevel"] = wanted["effort"].upper()
    if isinstance(wanted.get("display"), bool):
        out["includeThoughts"] = wanted["display"]
    return out


def _tool_config(sampling: Sampling) -> dict[str, Any] | None:
    choice = sampling.tool_choice
    if choice is None:
        return None
    name = options.choice_name(choice)
    if name is not None:
        return {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [name]}}
    return {"functionCallingConfig": {"mode": _MODES[choice]}} if choice in _MODES else None


def encode_request(
    call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
) -> bytes:
    """`model` is in the path of this dialect."""
    if call.dialect == "gemini" and call.raw:
        return _patch(call, sampling, extra)
    messages = list(call.messages)
    system: list[dict[str, Any]] = []
    while messages and messages[0].role == "system":
        system.extend({"text": part.text} for part in messages.pop(0).parts if isinstance(part, Text))
    body: dict[str, Any] = {"contents": list(_contents(messages))}
    if system:
        body["systemInstruction"] = {"parts": system}
    tools = _tools(call.tools)
    if tools:
        body["tools"] = tools
        config = _tool_config(sampling)
        if config is not None:
            body["toolConfig"] = config
    config = _config(sampling)
    if config:
        body["generationConfig"] = config
    return dump({**body, **sampling.extra, **extra})


def _patch(call: Call, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
    body: dict[str, Any] = dict(split_object(call.raw))
    differs = options.find_changes(call.sampling, sampling)
    if differs:
        place = "generation_config" if "generation_config" in body else "generationConfig"
        sent: msgspec.Raw = body.get(place, msgspec.Raw())
        config: dict[str, Any] = dict(split_object(bytes(sent))) if is_given(sent) else {}
        members = _config(sampling)
        for name in differs & _IN_CONFIG.keys():
            for member in _IN_CONFIG[name]:
                config.pop(member, None)
                if member in members:
                    config[member] = members[member]
        body[place] = config
        if "tool_choice" in differs:
            body.pop("toolConfig", None)
            wanted = _tool_config(sampling)
            if wanted is not None:
                body["toolConfig"] = wanted
        body.update(sampling.extra)
    return dump({**body, **extra})


def _contents(messages: Iterable[Message]) -> Iterable[dict[str, Any]]:
    """Results go into one user turn with the user message that follows them; late system messages are user turns."""
    names: dict[str, str] = {}
    results: list[Any] = []
    for message in messages:
        if message.role == "tool":
            results.extend(wire_parts(message.parts, names))
            continue
        parts = list(wire_parts(message.parts))
        if message.role == "user":
            yield {"role": "user", "parts": [*results, *parts]}
            results = []
            continue
        if results:
            yield {"role": "user", "parts": results}
            results = []
        names.update((tool_call.id, flat_name(tool_call)) for tool_call in message.tool_calls)
        yield {"role": "model" if message.role == "assistant" else "user", "parts": parts}
    if results:
        yield {"role": "user", "parts": results}


def _tools(tools: tuple[ToolSpec, ...]) -> list[Any]:
    functions: list[dict[str, Any]] = []
    others: list[Any] = []
    for tool in tools:
        if tool.kind.startswith("gemini/"):
            others.append(msgspec.Raw((tool.raw or "{}").encode()))
        elif tool.kind in ("function", "custom"):
            function: dict[str, Any] = {"name": flat_name(tool)}
            if tool.description:
                function["description"] = tool.description
            schema = CUSTOM_SCHEMA if tool.kind == "custom" else tool.schema
            if schema != "{}":
                function["parametersJsonSchema"] = msgspec.Raw(schema.encode())
            functions.append(function)
    return [*([{"functionDeclarations": functions}] if functions else []), *others]


class _Content(msgspec.Struct):
    parts: list[msgspec.Raw] | None = None


class _Chosen(msgspec.Struct, rename="camel"):
    token: str | None = None
    token_id: int | None = None
    log_probability: float | None = None


class _Top(msgspec.Struct):
    candidates: list[_Chosen] | None = None


class _Logprobs(msgspec.Struct, rename="camel"):
    chosen_candidates: list[_Chosen] | None = None
    top_candidates: list[_Top] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    logprobs_result: _Logprobs | None = None


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: TokenCount | None = None
    candidates_token_count: TokenCount | None = None
    thoughts_token_count: TokenCount | None = None
    cached_content_token_count: TokenCount | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Answer(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: _Usage | None = None
    model_version: str | None = None
    response_id: str | None = None
    prompt_feedback: _Feedback | None = None
    error: dict[str, Any] | None = None


_answer = msgspec.json.Decoder(_Answer)

_FINISH: dict[str, Finish] = {"STOP": "stop", "MAX_TOKENS": "length", "MALFORMED_FUNCTION_CALL": "error"}
_REFUSALS = {"SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"}


def _usage(body: _Usage | None) -> Usage:
    if body is None:
        return Usage()
    completion = body.candidates_token_count
    if body.thoughts_token_count is not None:
        completion = (completion or 0) + body.thoughts_token_count
    return Usage(
        prompt_tokens=body.prompt_token_count,
        completion_tokens=completion,
        cached_tokens=body.cached_content_token_count,
        reasoning_tokens=body.thoughts_token_count,
    )


def _entries(result: _Logprobs | None) -> list[TokenLogprob] | None:
    if result is None or result.chosen_candidates is None:
        return None
    tops = result.top_candidates or []
    entries: list[TokenLogprob] = []
    for index, chosen in enumerate(result.chosen_candidates):
        top = (tops[index].candidates or []) if index < len(tops) else []
        entries.append(
            TokenLogprob(
                chosen.token or "",
                chosen.log_probability,
                id=chosen.token_id,
                top_logprobs=tuple([TopLogprob(other.token or "", other.log_probability) for other in top]),
            )
        )
    return entries


def _message(raws: Iterable[msgspec.Raw]) -> Message:
    parts: list[Part] = []
    for raw in raws:
        for part in parts_of(raw):
            if isinstance(part, ToolCall) and part.id == part.name:  # the server sent no id
                part = msgspec.structs.replace(part, id=call_id(None))
            parts.append(part)
    return Message("assistant", tuple(join_parts(parts)))


def join_parts(parts: Iterable[Part]) -> Iterable[Part]:
    """Pieces of one text or thought put together: a stream has no other mark of where one ends."""
    held: Part | None = None
    for part in parts:
        if isinstance(held, Text) and isinstance(part, Text):
            held = Text(held.text + part.text)
        elif isinstance(held, Thinking) and isinstance(part, Thinking) and held.signature is None and held.text:
            held = Thinking(held.text + part.text, part.signature)
        else:
            if held is not None:
                yield held
            held = part
    if held is not None:
        yield held


def _reply(answer: _Answer, raw: bytes, call: Call | None) -> Reply:
    if answer.error is not None:
        raise UpstreamError(f"the model server failed: {answer.error.get('message')}", status=502, body=raw)
    candidate = answer.candidates[0] if answer.candidates else _Candidate()
    raws = (candidate.content.parts or []) if candidate.content else []
    blocked = answer.prompt_feedback.block_reason if answer.prompt_feedback else None
    reason = candidate.finish_reason or blocked
    if reason is None and not raws:
        raise UpstreamError("the model server's answer has no candidates", status=502, body=raw)
    message = _message(raws)
    if call is not None:
        message = in_namespaces(message, call.tools)
    finish: Finish = "refusal" if reason in _REFUSALS else _FINISH.get(reason or "STOP", "stop")
    if finish == "stop" and message.tool_calls:
        finish = "tool_calls"
    usage = _usage(answer.usage_metadata)
    entries = _entries(candidate.logprobs_result)
    tokens = read_tokens(prompt=None, completion=None, entries=entries, usage=usage)
    return Reply(
        message=message,
        finish=finish,
        stop_reason=reason,
        usage=usage,
        model=answer.model_version,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
        tokens=tokens.tokens,
        capture=tokens.capture,
        engine={"id": answer.response_id} if answer.response_id else {},
        trainable=not tokens.flaws,
        flaws=tokens.flaws,
        raw=raw,
        raw_dialect="gemini",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    return _reply(read_upstream(_answer, body), body, call)
