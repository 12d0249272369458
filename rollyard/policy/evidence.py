"""What a reply proves about its tokens: the capture level, and the flaws that make a turn untrainable.

Engines fail quietly: logprobs for fewer tokens than were sampled (split bytes merged), a sentinel such as -9999.0, ids
without logprobs, a usage count that disagrees. Every reply that claims tokens passes here before anybody sees it. A flaw
never changes an id: it marks the turn, loudly, and the export leaves it out.
"""

from __future__ import annotations

import math
from array import array

import msgspec

from rollyard.core.call import CaptureLevel, Reply

SENTINEL = -9000.0  # engines write -9999.0 (or lower) where they have no value
ROUNDING = 1e-6  # a logprob of 1e-7 is rounding; above this it is nonsense


def logprob_flaw(logprobs: array[float]) -> str | None:
    """The first reason why these cannot be logprobs of sampled tokens."""
    for index, value in enumerate(logprobs):
        if not math.isfinite(value):
            return f"logprob {index} is {value}"
        if value > ROUNDING:
            return f"logprob {index} is positive ({value})"
        if value <= SENTINEL:
            return f"logprob {index} is a sentinel ({value})"
    return None


def level_of(reply: Reply) -> CaptureLevel:
    """`tokens`: prompt ids, sampled ids and their logprobs. `logprobs`: logprobs without all ids. `text`: neither."""
    if reply.prompt_ids is not None and reply.completion_ids is not None and reply.logprobs is not None:
        return "tokens"
    if reply.logprobs is not None:
        return "logprobs"
    return "text"


def flaws_of(reply: Reply) -> tuple[str, ...]:
    """Contradictions inside a reply. What it does not claim is not a flaw; its level says so."""
    found: list[str] = []
    sampled, logprobs = reply.completion_ids, reply.logprobs
    if sampled is not None and logprobs is not None and len(sampled) != len(logprobs):
        found.append(f"{len(sampled)} sampled ids but {len(logprobs)} logprobs")
    if sampled is not None and any(token < 0 for token in sampled):
        found.append("a sampled id is negative")
    if sampled is not None and reply.usage.completion_tokens not in (None, len(sampled)):
        found.append(f"{len(sampled)} sampled ids but usage says {reply.usage.completion_tokens}")
    if logprobs is not None and (wrong := logprob_flaw(logprobs)) is not None:
        found.append(wrong)
    if reply.prompt_ids is not None and len(reply.prompt_ids) == 0:
        found.append("the prompt has no ids")
    return tuple(found)


def examined(reply: Reply) -> Reply:
    """The reply with its capture level and flaws set from what it holds."""
    flaws = tuple(dict.fromkeys((*reply.flaws, *flaws_of(reply))))
    return msgspec.structs.replace(reply, capture=level_of(reply), flaws=flaws, trainable=reply.trainable and not flaws)
