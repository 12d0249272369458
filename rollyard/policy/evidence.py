"""What a reply proves about its tokens: the capture level, and the flaws that make a turn untrainable.

Engines fail quietly: logprobs for fewer tokens than were sampled (split bytes merged), a sentinel such as -9999.0, a usage
count that disagrees. Every reply that claims tokens passes here before it is used. A flaw never changes an id: it
marks the turn, loudly, and the export leaves it out.
"""

from __future__ import annotations

import msgspec

from rollyard.core.call import CaptureLevel, Reply
from rollyard.trajectory.trajectory import flaws_of


def level_of(reply: Reply) -> CaptureLevel:
    """`tokens`: prompt ids, sampled ids and their logprobs. `logprobs`: logprobs without all ids. `text`: neither."""
    if reply.prompt_ids is not None and reply.completion_ids is not None and reply.logprobs is not None:
        return "tokens"
    if reply.logprobs is not None:
        return "logprobs"
    return "text"


def examine(reply: Reply) -> Reply:
    """The reply with its capture level and flaws set from what it holds. What it does not claim is not a flaw."""
    flaws = [*flaws_of(reply)]
    sampled = reply.completion_ids
    if sampled is not None and reply.usage.completion_tokens not in (None, len(sampled)):
        flaws.append(f"{len(sampled)} sampled ids but usage says {reply.usage.completion_tokens}")
    if sampled is not None and any(token < 0 for token in sampled):
        flaws.append("a sampled id is negative")
    return msgspec.structs.replace(
        reply, capture=level_of(reply), flaws=tuple(dict.fromkeys(flaws)), trainable=reply.trainable and not flaws
    )
