"""`Call`: one request of an agent. `Reply`: the policy's answer, with the tokens it sampled. `CallRecord`: both as the
store keeps them.

Token ids and logprobs are packed arrays (`array("i")`, `array("d")`): small, exact, and never JSON. `None` means unknown;
an empty array means that there were none.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message, ToolSpec

Dialect = Literal["chat", "completions", "responses", "messages", "gemini"]
CallKind = Literal["agent", "subagent", "auxiliary", "compaction", "user"]  # `user`: of a simulated one
USER_STOP = "###STOP###"  # what a simulated user says when it is content
Finish = Literal["stop", "tool_calls", "length", "refusal", "budget", "error"]
CaptureLevel = Literal["tokens", "logprobs", "text", "none"]
Edge = Literal["root", "extends", "retry_of", "compacted_from", "spawned_by"]
PromptSource = Literal["bridge", "bridged_by_id", "render", "engine"]
PauseMode = Literal["abort", "wait", "keep"]  # what becomes of answers under way while a model server takes new weights

REPLAYED = "replayed"  # the flaw of an answer that was sampled then, not now
GIVEN_BY_CALLER = "said by the caller"  # the flaw of an answer that the caller wrote in place of the policy's
NO_THINKING = '{"enabled":false}'  # as `Sampling.reasoning`
Ids = array  # array("i"): token ids


def ids(values: Any = ()) -> array[int]:
    return array("i", values)


def floats(values: Any = ()) -> array[float]:
    return array("d", values)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling parameters; `None` is unset. `extra` holds what a provider has and others do not."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | None = None  # JSON text or a bare word
    parallel_tool_calls: bool | None = None
    reasoning: str | None = None  # JSON text of the provider's thinking/effort option
    response_format: str | None = None  # JSON text
    extra: Mapping[str, Any] = {}


# What a server says; more could be neither stored nor added up
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**29)]


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Continuation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answered call that a request goes on from, as the trajectory found it. `new` are the request's messages after
    that answer. `deltas` are the ids of its prompt and answer, piece by piece, shared with the trajectory: read them
    through `ids`. None where some of them are unknown. `edited` says that the agent sent some answer back in other words,
    known by the ids of its tool calls alone."""

    call_id: str
    answer: Message
    new: tuple[Message, ...]
    deltas: tuple[array[int], ...] | None = None
    sampled: int = 0  # how many of the ids, at the end, are the answer's
    edited: bool = False

    def ids(self) -> array[int]:
        """What the model saw and sampled, as one array of the caller's own."""
        return array("i", b"".join(self.deltas or ()))


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One decoded request. `raw` is the body as received; `headers` holds only the allow-listed ones, lower case."""

    id: str
    rollout_id: str
    dialect: Dialect
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tools_digest: bytes = b""
    sampling: Sampling = Sampling()
    stream: bool = False
    framing: Literal["sse", "array"] = "sse"  # how a stream is framed: Gemini also knows a JSON array
    include_usage: bool = False
    kind: CallKind = "agent"
    thread: str | None = None
    parent_thread: str | None = None
    raw: bytes = b""
    raw_digest: bytes = b""  # sha256 of `raw`, set where it is computed already
    history: tuple[int, int] | None = None  # where in `raw` the list of messages lies, where that is known
    headers: Mapping[str, str] = {}
    received_at: float = 0.0
    continues: Continuation | None = None
    fork_reason: str | None = None  # why it continues no earlier call; None for a plain repetition
    prompt_ids: array[int] | None = None  # set by a renderer, for a policy that takes tokens
    prompt_source: PromptSource | None = None
    inserted: tuple[tuple[int, int], ...] = ()  # half-open ranges of prompt_ids that no model sampled
    break_reason: str | None = None
    # settings of this session for the policy: model, base_url, api_key, max_tokens_cap, disable_thinking, top_logprobs, sampling
    options: Mapping[str, Any] = {}

    @property
    def wanted(self) -> Sampling:
        """What to sample with: what the agent asked for, and the session's options over it."""
        changes = dict(self.options.get("sampling") or {})
        if (cap := self.options.get("max_tokens_cap")) is not None:
            wanted = changes.get("max_tokens", self.sampling.max_tokens)
            changes["max_tokens"] = cap if wanted is None else min(wanted, cap)
        if (top := self.options.get("top_logprobs")) is not None:
            changes |= {"logprobs": True, "top_logprobs": max(top, self.sampling.top_logprobs or 0)}
        if self.options.get("disable_thinking"):
            changes["reasoning"] = NO_THINKING
        return msgspec.structs.replace(self.sampling, **changes) if changes else self.sampling


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens `start:end` of a completion were sampled by policy `version`."""

    version: int
    start: int
    end: int


class TokenText(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One sampled token as text, with the alternatives the engine named."""

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A complete answer. `raw` is the upstream's own body when there was one, `raw_dialect` its format."""

    message: Message
    finish: Finish = "stop"
    stop_reason: str | None = None
    usage: Usage = Usage()
    model: str | None = None
    prompt_ids: array[int] | None = None
    completion_ids: array[int] | None = None
    logprobs: array[float] | None = None
    tokens: tuple[TokenText, ...] = ()
    inserted: tuple[tuple[int, int], ...] = ()
    prompt_source: PromptSource | None = None
    break_reason: str | None = None  # why the policy had to render the prompt in full
    capture: CaptureLevel = "text"
    version_start: int | None = None
    version_end: int | None = None
    spans: tuple[VersionSpan, ...] = ()
    experts: RoutedExperts | None = None  # of prompt and answer, less the last token
    sampling: Sampling | None = None  # what was really used
    logprobs_mode: Literal["raw", "processed"] | None = None
    engine: Mapping[str, Any] = {}
    trainable: bool = True
    flaws: tuple[str, ...] = ()  # why this turn cannot be trained on
    raw: bytes = b""
    raw_dialect: Dialect | None = None
    started_at: float | None = None
    finished_at: float | None = None


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A call as the store keeps it: placed in the trajectory, history by reference. `new_nodes` are ids of the nodes this
    call added; `leaf` is the node of its answer (None when it failed)."""

    id: str
    rollout_id: str
    seq: int
    dialect: Dialect
    kind: CallKind
    edge: Edge
    parent_call_id: str | None = None
    break_reason: str | None = None
    first_mismatch: int | None = None
    thread: str | None = None
    parent_thread: str | None = None
    model_requested: str = ""
    model_served: str | None = None
    leaf: int | None = None
    prompt_leaf: int | None = None
    new_nodes: tuple[int, ...] = ()
    tools_digest: bytes = b""
    capture: CaptureLevel = "text"
    prompt_source: PromptSource | None = None
    finish: Finish | None = None
    stop_reason: str | None = None
    version_start: int | None = None
    version_end: int | None = None
    spans: tuple[VersionSpan, ...] = ()
    requested: Sampling = Sampling()
    effective: Sampling | None = None
    logprobs_mode: str | None = None
    engine: Mapping[str, Any] = {}
    usage: Usage = Usage()
    trainable: bool = True
    flaws: tuple[str, ...] = ()
    error: str | None = None
    # The model server's HTTP status: of a refusal, and of every call that passed through unread
    status: int | None = None
    raw_request: bytes = b""  # digest of the stored request body
    raw_response: bytes = b""
    received_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
