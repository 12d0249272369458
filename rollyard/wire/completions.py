"""Legacy text completions: a prompt in, its continuation out.

The prompt is text or token ids. Text becomes one `user` message; ids become `prompt_ids` and are sent on as they are, which
is also how a policy that renders for itself talks to a model server (token ids in, token ids out).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec

from rollyard.core.call import Call, Dialect, Finish, Reply, Sampling
from rollyard.core.errors import BadRequest, Unsupported, UpstreamError
from rollyard.core.message import Message, Text
from rollyard.wire import openai_shapes, options
from rollyard.wire.body import (
    ABSENT,
    WholeNumber,
    dump,
    from_agent,
    from_upstream,
    read_upstream,
    split_object,
)
from rollyard.wire.chat_upstream import sampling_members
from rollyard.wire.codec import Memo, WireRequest
from rollyard.wire.members import BodyReader
from rollyard.wire.parts import pieces
from rollyard.wire.sse import COMMENT, DONE, frame
from rollyard.wire.tokens import TokenLogprob, TopLogprob, as_ids, prompt_ids, read_tokens


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    prompt: str | list[Any]
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    min_p: float | None = None
    max_tokens: WholeNumber | None = None
    stop: str | list[str] | None = None
    seed: WholeNumber | None = None
    n: WholeNumber | None = None
    best_of: WholeNumber | None = None
    echo: bool | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: WholeNumber | None = None


_body = BodyReader(_Body, "completions")
_ONLY_CHAT = ("logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls", "reasoning_effort")


def _prompt(value: str | list[Any]) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and not all(type(item) is int for item in value):
        raise BadRequest("prompt: one text, or one list of token ids, is answered per call")
    return value


@from_agent
def decode(request: WireRequest, memo: Memo | None = None) -> Call:
    body = _body.read(request.body)
    for name, one in (("n", body.n), ("best_of", body.best_of)):
        if one is not None and one != 1:
            raise BadRequest(f"{name}: one choice per call is answered")
    if body.echo or body.suffix:
        raise BadRequest("echo and suffix are not supported")
    prompt = _prompt(body.prompt)
    prompt_ids = None if isinstance(prompt, str) else as_ids(prompt)
    if prompt_ids is None and not isinstance(prompt, str):
        raise BadRequest("prompt: a token id is out of range")
    stop = body.stop
    return Call(
        id=request.call_id,
        rollout_id=request.rollout_id,
        dialect="completions",
        model=body.model,
        messages=(Message("user", (Text(prompt),)),) if isinstance(prompt, str) else (),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            max_tokens=body.max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            seed=body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logprobs=None if body.logprobs is None else True,
            top_logprobs=body.logprobs,
        ),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        raw=request.body,
        headers=request.headers,
        received_at=request.received_at,
        prompt_ids=prompt_ids,
    )


def _envelope(call: Call) -> dict[str, Any]:
    created = int(call.received_at)
    return {"id": f"cmpl-{call.id}", "object": "text_completion", "created": created, "model": call.model}


def _finish(reply: Reply) -> str:
    return {"length": "length", "refusal": "content_filter"}.get(reply.finish, "stop")


def _logprobs(call: Call, reply: Reply) -> dict[str, Any] | None:
    if not call.sampling.logprobs or not reply.tokens:
        return None
    top = call.sampling.top_logprobs or 0
    words = [token.text for token in reply.tokens]
    return {
        "tokens": words,
        "token_logprobs": [token.logprob for token in reply.tokens],
        "top_logprobs": [dict(token.top[:top]) for token in reply.tokens],
        "text_offset": [0, *accumulate(len(word) for word in words[:-1])],
    }


def _choice(text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


def encode(call: Call, reply: Reply) -> bytes:
    body = _envelope(call)
    body["choices"] = [_choice(reply.message.text, _finish(reply), _logprobs(call, reply))]
    body["usage"] = msgspec.Raw(openai_shapes.chat_usage(reply))
    return dump(body)


def stream(call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
    body = _envelope(call)
    logprobs = _logprobs(call, reply)
    for piece in pieces(reply.message.text):
        body["choices"] = [_choice(piece, None, logprobs)]
        logprobs = None
        yield frame(dump(body))
    body["choices"] = [_choice("", _finish(reply), logprobs)]
    yield frame(dump(body))
    if call.include_usage:
        body["choices"] = []
        body["usage"] = msgspec.Raw(openai_shapes.chat_usage(reply))
        yield frame(dump(body))
    yield DONE


def encode_request(
    call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
) -> bytes:
    """Token ids where the call has them; else its text, where it is a bare prompt."""
    if call.dialect == "completions" and call.raw and not options.find_changes(call.sampling, sampling):
        body: dict[str, Any] = dict(split_object(call.raw))
        for name in ("stream", "stream_options"):
            body.pop(name, None)
        return dump({**body, "model": model, **extra})
    if call.prompt_ids is not None:
        prompt: Any = call.prompt_ids.tolist()
    elif len(call.messages) == 1 and call.messages[0].role == "user" and not call.tools:
        prompt = call.messages[0].text
    else:
        raise Unsupported("a completions upstream takes a prompt, not messages", hint="give the policy a renderer")
    members = {name: value for name, value in sampling_members(sampling).items() if name not in _ONLY_CHAT}
    if sampling.logprobs:
        members["logprobs"] = sampling.top_logprobs or 0
    return dump({"model": model, "prompt": prompt, **members, **extra})


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    model: str | None = None
    usage: openai_shapes.UsageBody | None = None
    id: str | None = None


_completion = msgspec.json.Decoder(_Completion)
_FINISH: dict[str, Finish] = {"length": "length", "content_filter": "refusal", "abort": "error"}


def _entries(logprobs: _Logprobs | None) -> list[TokenLogprob] | None:
    if logprobs is None or logprobs.token_logprobs is None:
        return None
    words = logprobs.tokens or []
    tops = logprobs.top_logprobs or []
    entries: list[TokenLogprob] = []
    for index, value in enumerate(logprobs.token_logprobs):
        top = (tops[index] or {}) if index < len(tops) else {}
        word = words[index] if index < len(words) else ""
        others = tuple([TopLogprob(other, lp) for other, lp in top.items()])
        entries.append(TokenLogprob(word, value, top_logprobs=others))
    return entries


def _reply(completion: _Completion, raw: bytes, memo: Memo | None = None) -> Reply:
    if not completion.choices:
        raise UpstreamError("the model server's answer has no choices", status=502, body=raw)
    choice = completion.choices[0]
    usage = openai_shapes.usage_of(completion.usage)
    prompt = prompt_ids(choice.prompt_token_ids, memo)
    tokens = read_tokens(prompt=prompt, completion=choice.token_ids, entries=_entries(choice.logprobs), usage=usage)
    return Reply(
        message=Message("assistant", (Text(choice.text),) if choice.text else ()),
        finish=_FINISH.get(choice.finish_reason or "stop", "stop"),
        stop_reason=choice.finish_reason,
        usage=usage,
        model=completion.model,
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
        tokens=tokens.tokens,
        prompt_source="engine" if tokens.prompt_ids is not None else None,
        capture=tokens.capture,
        engine={"id": completion.id} if completion.id else {},
        trainable=not tokens.flaws,
        flaws=tokens.flaws,
        raw=raw,
        raw_dialect="completions",
    )


@from_upstream
def decode_reply(body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
    return _reply(read_upstream(_completion, body), body, memo)


class CompletionsCodec:
    name: Dialect = "completions"
    upstream_path = "/completions"

    decode = staticmethod(decode)
    encode = staticmethod(encode)
    stream = staticmethod(stream)
    error = staticmethod(openai_shapes.error)
    model = staticmethod(openai_shapes.model)
    models = staticmethod(openai_shapes.models)
    encode_request = staticmethod(encode_request)
    decode_reply = staticmethod(decode_reply)

    def stream_type(self, call: Call) -> str:
        return "text/event-stream"

    def opening(self, call: Call) -> bytes:
        return b""

    def keepalive(self, call: Call) -> bytes:
        return COMMENT

    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes:
        return frame(openai_shapes.error(status, code, message))

    def count_tokens(self, count: int) -> bytes:
        return dump({"object": "token_count", "input_tokens": count})
