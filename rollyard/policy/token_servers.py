"""Model servers that take token ids and give token ids: how each is asked, and how its answer is read.

Values, no I/O. `vllm` is the tokens endpoint of vLLM (and of our own `serve model`), `completions` the older one that every
vLLM has, `sglang` its native endpoint, `llamacpp` its `/completion`. None of them parses tool calls: that is the renderer's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rollyard.core.call import Sampling, VersionSpan, floats, ids
from rollyard.core.errors import UpstreamError
from rollyard.core.experts import RoutedExperts, join_experts, read_experts
from rollyard.core.numbers import whole_number

Kind = Literal["vllm", "completions", "sglang", "llamacpp", "torch"]


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the prompt, what to sample with, and the tokens that end a turn."""

    model: str
    prompt: array[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    top_logprobs: int = 0


class SampledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `mode` says whether the logprobs are of the raw or of the truncated, tempered distribution."""

    ids: array[int]
    logprobs: array[float] | None
    prompt: array[int] | None = None  # the prompt that the engine says it used
    cut: bool = False
    aborted: bool = False
    mode: Literal["raw", "processed"] | None = None
    version: int | None = None
    spans: tuple[VersionSpan, ...] = ()
    experts: RoutedExperts | None = None
    stop_reason: str | None = None
    flaws: tuple[str, ...] = ()
    engine: Mapping[str, Any] = {}


class TokenServer(msgspec.Struct, frozen=True):
    name: Kind
    path: str  # below the server's root
    request: Callable[[TokenRequest], dict[str, Any]]
    read: Callable[[dict[str, Any]], SampledAnswer]


def join_answers(before: SampledAnswer, after: SampledAnswer) -> SampledAnswer:
    """Two parts of one completion, each token with its own version where that is known."""
    count, total = len(before.ids), len(before.ids) + len(after.ids)
    shifted = (VersionSpan(s.version, s.start + count, s.end + count) for s in known_spans(after))
    spans = join_spans((*known_spans(before), *shifted))
    whole = before.logprobs is not None and after.logprobs is not None
    return msgspec.structs.replace(
        after,
        ids=before.ids + after.ids,
        logprobs=before.logprobs + after.logprobs
        if before.logprobs is not None and after.logprobs is not None
        else None,
        spans=spans,
        experts=later_experts(before.experts, after.experts),
        flaws=(*before.flaws, *after.flaws, *(() if whole or not total else ("a part came without logprobs",))),
    )


def later_experts(before: RoutedExperts | None, after: RoutedExperts | None) -> RoutedExperts | None:
    """Each part has those of all tokens before its end; what the first part sampled went through the first ones."""
    return None if before is None or after is None else join_experts((before, after.rows(len(before))))


def experts_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"experts": read_experts(choice.get("routed_experts"))}
    except ValueError as error:
        return {"flaws": (str(error),)}


def known_spans(part: SampledAnswer) -> tuple[VersionSpan, ...]:
    if part.spans or not part.ids or part.version is None:
        return part.spans
    return (VersionSpan(part.version, 0, len(part.ids)),)


def join_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version are one span."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and (found[-1].version, found[-1].end) == (span.version, span.start):
            found[-1] = VersionSpan(span.version, found[-1].start, span.end)
        else:
            found.append(span)
    return tuple(found)


def drop_unknown(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def shared_sampling(ask: TokenRequest) -> dict[str, Any]:
    """Sampling as vLLM, SGLang and llama.cpp alike call it, and what the operator adds for one of them."""
    s = ask.sampling
    return dict(s.extra) | drop_unknown(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=s.seed,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        stop=list(s.stop) or None,
    )


def ask_vllm(ask: TokenRequest) -> dict[str, Any]:
    params = shared_sampling(ask) | {
        "max_tokens": ask.max_tokens,
        "logprobs": max(1, ask.top_logprobs),
        "stop_token_ids": list(ask.stop_ids),
        "skip_special_tokens": False,
    }
    return {"model": ask.model, "token_ids": ask.prompt.tolist(), "sampling_params": params, "stream": False}


def read_vllm(body: dict[str, Any]) -> SampledAnswer:
    choice = first(body, "choices")
    entries = (choice.get("logprobs") or {}).get("content")
    return SampledAnswer(
        ids=id_array(choice.get("token_ids")),
        logprobs=None if entries is None else logprob_array([entry.get("logprob") for entry in entries]),
        cut=choice.get("finish_reason") == "length",
        aborted=choice.get("finish_reason") == "abort",
        mode=body.get("logprobs_mode"),
        spans=spans_of(choice.get("weight_versions")),
        stop_reason=choice.get("finish_reason"),
        engine=drop_unknown(request_id=body.get("request_id")),
        **experts_of(choice),
    )


def ask_completions(ask: TokenRequest) -> dict[str, Any]:
    return shared_sampling(ask) | {
        "model": ask.model,
        "prompt": ask.prompt.tolist(),
        "max_tokens": ask.max_tokens,
        "logprobs": ask.top_logprobs,
        "return_token_ids": True,
        "stop_token_ids": list(ask.stop_ids),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "stream": False,
    }


def read_completions(body: dict[str, Any]) -> SampledAnswer:
    choice = first(body, "choices")
    values, prompt = (choice.get("logprobs") or {}).get("token_logprobs"), choice.get("prompt_token_ids")
    return SampledAnswer(
        ids=id_array(choice.get("token_ids")),
        logprobs=None if values is None else logprob_array(values),
        prompt=None if prompt is None else id_array(prompt),
        cut=choice.get("finish_reason") == "length",
        aborted=choice.get("finish_reason") == "abort",
        spans=spans_of(choice.get("weight_versions")),
        stop_reason=choice.get("finish_reason"),
        engine=drop_unknown(request_id=body.get("id")),
        **experts_of(choice),
    )


def ask_sglang(ask: TokenRequest) -> dict[str, Any]:
    params = shared_sampling(ask) | {
        "max_new_tokens": ask.max_tokens,
        "stop_token_ids": list(ask.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    seed = params.pop("seed", None)
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "input_ids": ask.prompt.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": ask.top_logprobs,
        "stream": False,
    }


def read_sglang(body: dict[str, Any]) -> SampledAnswer:
    meta = body.get("meta_info") or {}
    rows = meta.get("output_token_logprobs")
    finish = meta.get("finish_reason") or {}
    flaws: tuple[str, ...] = ()
    named = None if rows is None else [row[1] for row in rows]
    sampled = id_array(body.get("output_ids", named))
    if named is not None and named != sampled.tolist():
        flaws = ("the ids beside the logprobs are not the ids of the answer",)
    return SampledAnswer(
        ids=sampled,
        logprobs=None if rows is None else logprob_array([row[0] for row in rows]),
        cut=finish.get("type") == "length",
        aborted=finish.get("type") == "abort",
        version=whole_number(meta.get("weight_version")),
        spans=spans_of(meta.get("weight_versions")),
        stop_reason=finish.get("type"),
        flaws=flaws,
        engine=drop_unknown(request_id=meta.get("id")),
    )


def ask_llamacpp(ask: TokenRequest) -> dict[str, Any]:
    return shared_sampling(ask) | {
        "prompt": ask.prompt.tolist(),
        "n_predict": ask.max_tokens,
        "n_probs": max(1, ask.top_logprobs),
        "return_tokens": True,
        "cache_prompt": True,
        "stream": False,
    }


def read_llamacpp(body: dict[str, Any]) -> SampledAnswer:
    sampled = id_array(body.get("tokens"))
    entries = body.get("completion_probabilities") or []
    flaws: tuple[str, ...] = ()
    if [entry.get("id") for entry in entries] != sampled.tolist():
        flaws = (f"{len(sampled)} sampled ids but logprobs for {len(entries)} others",)
    return SampledAnswer(
        ids=sampled,
        logprobs=None if flaws else logprob_array([entry.get("logprob") for entry in entries]),
        cut=body.get("stop_type") == "limit",
        mode="raw",
        stop_reason=body.get("stop_type"),
        flaws=flaws,
        engine=drop_unknown(truncated=body.get("truncated") or None),
    )


ENGINES: Mapping[str, TokenServer] = {
    "vllm": TokenServer("vllm", "/inference/v1/generate", ask_vllm, read_vllm),
    "torch": TokenServer("torch", "/inference/v1/generate", ask_vllm, read_vllm),
    "completions": TokenServer("completions", "/v1/completions", ask_completions, read_completions),
    "sglang": TokenServer("sglang", "/generate", ask_sglang, read_sglang),
    "llamacpp": TokenServer("llamacpp", "/completion", ask_llamacpp, read_llamacpp),
}
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "rollyard": "torch"}  # `owned_by` in /v1/models


def first(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    rows = body.get(name)
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        raise UpstreamError(f"the model server's answer has no {name}", status=502)
    return rows[0]


def id_array(values: Any) -> array[int]:
    if not isinstance(values, list):
        raise UpstreamError("the model server gave no token ids", status=502)
    try:
        return ids(values)
    except (TypeError, OverflowError) as error:
        raise UpstreamError("the model server's ids are not integers", status=502) from error


def logprob_array(values: Sequence[Any]) -> array[float]:
    """A missing value becomes NaN, which the checks refuse; nothing is filled in."""
    return floats(float("nan") if value is None else float(value) for value in values)


def spans_of(rows: Any) -> tuple[VersionSpan, ...]:
    """SGLang's rows `[version, start, end]`, or vLLM's objects of these names. A version that is no number (vLLM calls the one
    it was started with `default`) is not known."""
    found: list[VersionSpan] = []
    for row in rows if isinstance(rows, list) else ():
        one: Any = [row.get(name) for name in VersionSpan.__struct_fields__] if isinstance(row, dict) else row
        if not isinstance(one, list) or len(one) != 3:
            return ()
        version, start, end = (whole_number(value) for value in one)
        if start is None or end is None:
            return ()
        if version is not None:
            found.append(VersionSpan(version, start, end))
    return tuple(found)
