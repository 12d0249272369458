"""What OpenAI's endpoints share: errors, the list of models, usage."""

from __future__ import annotations

from typing import Any

import msgspec

from rollyard.core.call import Call, Reply, TokenCount, TokenText, Usage
from rollyard.wire.body import dump

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(status: int, code: str, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": None, "code": code}


def error(status: int, code: str, message: str) -> bytes:
    return dump({"error": error_object(status, code, message)})


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollyard"}


def model(name: str) -> bytes:
    return dump(_model(name))


def models(names: list[str]) -> bytes:
    return dump({"object": "list", "data": [_model(name) for name in names]})


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: TokenCount | None = None


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: TokenCount | None = None


class UsageBody(msgspec.Struct, gc=False):
    """Chat and Responses name the same numbers differently; a body has one set of them."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    input_tokens_details: _PromptDetails | None = None
    output_tokens_details: _CompletionDetails | None = None


def usage_of(body: UsageBody | None) -> Usage:
    if body is None:
        return Usage()
    before = body.prompt_tokens_details or body.input_tokens_details
    after = body.completion_tokens_details or body.output_tokens_details
    return Usage(
        prompt_tokens=body.prompt_tokens if body.prompt_tokens is not None else body.input_tokens,
        completion_tokens=body.completion_tokens if body.completion_tokens is not None else body.output_tokens,
        cached_tokens=before.cached_tokens if before else None,
        reasoning_tokens=after.reasoning_tokens if after else None,
    )


def counts(reply: Reply) -> tuple[int, int]:
    """(prompt, completion) tokens as agents see them: what the server said, else what the ids say, else 0, because
    agents compute with these numbers and the wire has no word for unknown."""
    usage = reply.usage
    prompt = usage.prompt_tokens
    if prompt is None:
        prompt = len(reply.prompt_ids) if reply.prompt_ids is not None else 0
    completion = usage.completion_tokens
    if completion is None:
        completion = len(reply.completion_ids) if reply.completion_ids is not None else 0
    return prompt, completion


_CHAT_USAGE = (
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},'
    b'"completion_tokens_details":{"reasoning_tokens":%d}}'
)
_RESPONSES_USAGE = (
    b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,'
    b'"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
)


def chat_usage(reply: Reply) -> bytes:
    """As JSON."""
    prompt, completion = counts(reply)
    usage = reply.usage
    cached, reasoning = usage.cached_tokens or 0, usage.reasoning_tokens or 0
    return _CHAT_USAGE % (prompt, completion, prompt + completion, cached, reasoning)


def responses_usage(reply: Reply) -> bytes:
    """As JSON."""
    prompt, completion = counts(reply)
    usage = reply.usage
    cached, reasoning = usage.cached_tokens or 0, usage.reasoning_tokens or 0
    return _RESPONSES_USAGE % (prompt, cached, completion, reasoning, prompt + completion)


def logprobs(call: Call, reply: Reply) -> list[dict[str, Any]]:
    """What the agent asked to see of the tokens; empty when it did not ask or nothing is known."""
    if not call.sampling.logprobs:
        return []
    top = call.sampling.top_logprobs or 0
    return [_logprob(token, top) for token in reply.tokens]


def _logprob(token: TokenText, top: int) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob if token.logprob is not None else -9999.0,
        "bytes": list(token.text.encode("utf-8", "replace")),
        "top_logprobs": [
            {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}
            for text, value in token.top[:top]
        ],
    }
