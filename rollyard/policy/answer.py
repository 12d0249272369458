"""A trainer's answer to a held call, checked, as a `Reply`.

The ids recorded are the ones given, never ids made from text. An answer that contradicts itself (lengths, logprobs that
are not logprobs) is refused before it reaches the agent, and the call stays open for a better one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from rollyard.core.call import Call, Finish, Reply, Usage, VersionSpan, floats, ids
from rollyard.core.errors import ReplyRefused
from rollyard.core.message import Message, Text
from rollyard.policy.evidence import examined
from rollyard.policy.parsers.protocol import stamped
from rollyard.policy.renderers.protocol import Renderer


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer may say. One of `ids`, `text`, `message` or `reply` is needed."""

    ids: array[int] | None = None
    logprobs: array[float] | None = None
    version: int | None = None
    text: str | None = None
    message: Message | None = None
    finish: Finish | None = None
    reply: Reply | None = None


def answer(
    sampled: Iterable[int] | None = None,
    logprobs: Iterable[float] | None = None,
    *,
    version: int | None = None,
    text: str | None = None,
    message: Message | None = None,
    finish: Finish | None = None,
    reply: Reply | None = None,
) -> Answer:
    """The arguments of `held.reply`: arrays, lists, tensors that iterate as numbers."""
    try:
        given = Answer(
            ids=None if sampled is None else ids(int(token) for token in sampled),
            logprobs=None if logprobs is None else floats(float(value) for value in logprobs),
            version=version,
            text=text,
            message=message,
            finish=finish,
            reply=reply,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ReplyRefused(f"ids must be integers and logprobs numbers: {error}") from error
    if given.ids is not None and any(token < 0 for token in given.ids):
        raise ReplyRefused("an id is negative")
    return given


def reply_of(call: Call, given: Answer, renderer: Renderer | None) -> Reply:
    if given.reply is not None:
        return examined(given.reply)
    if given.logprobs is not None and given.ids is None:
        raise ReplyRefused("logprobs need the ids they belong to")
    message = message_of(call, given, renderer)
    sampled = given.ids
    count = None if sampled is None else len(sampled)
    versioned: dict[str, Any] = {}
    if given.version is not None:
        versioned = {"version_start": given.version, "version_end": given.version}
        if count:
            versioned["spans"] = (VersionSpan(given.version, 0, count),)
    reply = examined(
        Reply(
            message=message,
            finish=given.finish or finish_of(message, sampled, renderer),
            usage=Usage(
                prompt_tokens=None if call.prompt_ids is None else len(call.prompt_ids), completion_tokens=count
            ),
            model=call.model,
            prompt_ids=call.prompt_ids,
            completion_ids=sampled,
            logprobs=given.logprobs,
            inserted=call.inserted,
            prompt_source=call.prompt_source,
            sampling=call.sampling,
            break_reason=call.break_reason,
            finished_at=time.time(),
            **versioned,
        )
    )
    if reply.flaws:
        raise ReplyRefused("; ".join(reply.flaws))
    return reply


def message_of(call: Call, given: Answer, renderer: Renderer | None) -> Message:
    if given.message is not None:
        return given.message
    if given.text is not None:
        return Message("assistant", (Text(given.text),) if given.text else ())
    if given.ids is None:
        raise ReplyRefused("an answer needs ids, text, a message or a reply")
    if renderer is None:
        raise ReplyRefused("ids alone need Queue(renderer=...); or send text or a message with them")
    return stamped(renderer.parse(given.ids, call.tools), call.id)


def finish_of(message: Message, sampled: array[int] | None, renderer: Renderer | None) -> Finish:
    """A turn that ends without a stop token was cut, whatever it says."""
    if sampled is not None and renderer is not None and (not sampled or sampled[-1] not in renderer.stop_ids):
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
