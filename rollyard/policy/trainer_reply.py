"""A trainer's answer to a held call, checked, as a `Reply`.

The ids recorded are the ones given, never ids made from text. An answer that contradicts itself (lengths, logprobs that
are not logprobs) is refused before it reaches the agent, and the call stays open for a better one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import msgspec

from rollyard.core.call import Call, Finish, Reply, TokenText, Usage, VersionSpan, floats, ids
from rollyard.core.errors import ReplyRefused
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message, Text
from rollyard.policy.evidence import examine
from rollyard.policy.parsers.protocol import stamp_call_ids
from rollyard.policy.renderers.protocol import Renderer


class TrainerReply(msgspec.Struct, frozen=True, kw_only=True):
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
) -> TrainerReply:
    """The arguments of `held.reply`: arrays, lists, tensors that iterate as numbers."""
    try:
        given = TrainerReply(
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


def reply_of(call: Call, given: TrainerReply, renderer: Renderer | None) -> Reply:
    if given.reply is not None:
        return examine(given.reply)
    if given.logprobs is not None and given.ids is None:
        raise ReplyRefused("logprobs need the ids they belong to")
    message = message_of(call, given, renderer)
    finish = given.finish or finish_of(message, given.ids, renderer)
    reply = build_reply(call, message, finish, given.ids, given.logprobs, renderer)
    if reply.flaws:
        raise ReplyRefused("; ".join(reply.flaws))
    if given.version is None:
        return reply
    spans = (VersionSpan(given.version, 0, len(given.ids)),) if given.ids else ()
    return msgspec.structs.replace(reply, version_start=given.version, version_end=given.version, spans=spans)


def make_reply(
    call: Call,
    sampled: array[int],
    logprobs: array[float] | None,
    renderer: Renderer,
    *,
    cut: bool,
    flaws: tuple[str, ...] = (),
    experts: RoutedExperts | None = None,
) -> Reply:
    """What an engine sampled for a prepared call. Contradictions mark the turn; they do not stop the agent."""
    message = stamp_call_ids(renderer.parse(sampled, call.tools), call.id)
    finish: Finish = "length" if cut else "tool_calls" if message.tool_calls else "stop"
    return build_reply(call, message, finish, sampled, logprobs, renderer, flaws, experts)


def build_reply(
    call: Call,
    message: Message,
    finish: Finish,
    sampled: array[int] | None,
    logprobs: array[float] | None,
    renderer: Renderer | None,
    flaws: tuple[str, ...] = (),
    experts: RoutedExperts | None = None,
) -> Reply:
    prompt = call.prompt_ids
    return examine(
        Reply(
            message=message,
            finish=finish,
            usage=Usage(
                prompt_tokens=None if prompt is None else len(prompt),
                completion_tokens=None if sampled is None else len(sampled),
            ),
            model=call.model,
            prompt_ids=prompt,
            completion_ids=sampled,
            logprobs=logprobs,
            tokens=token_texts(sampled, logprobs, renderer),
            inserted=call.inserted,
            prompt_source=call.prompt_source,
            break_reason=call.break_reason,
            sampling=call.sampling,
            experts=experts,
            flaws=flaws,
            finished_at=time.time(),
        )
    )


def token_texts(
    sampled: array[int] | None, logprobs: array[float] | None, renderer: Renderer | None
) -> tuple[TokenText, ...]:
    """Each sampled token as text, for people; a token that is part of a character shows as the replacement sign."""
    if sampled is None or renderer is None:
        return ()
    values = logprobs if logprobs is not None and len(logprobs) == len(sampled) else [None] * len(sampled)
    return tuple(TokenText(renderer.decode(ids((t,))), value) for t, value in zip(sampled, values, strict=True))


def message_of(call: Call, given: TrainerReply, renderer: Renderer | None) -> Message:
    if given.message is not None:
        return given.message
    if given.text is not None:
        return Message("assistant", (Text(given.text),) if given.text else ())
    if given.ids is None:
        raise ReplyRefused("an answer needs ids, text, a message or a reply")
    if renderer is None:
        raise ReplyRefused("ids alone need Queue(renderer=...); or send text or a message with them")
    return stamp_call_ids(renderer.parse(given.ids, call.tools), call.id)


def finish_of(message: Message, sampled: array[int] | None, renderer: Renderer | None) -> Finish:
    """A turn that ends without a stop token was cut, whatever it says."""
    if sampled is not None and renderer is not None and (not sampled or sampled[-1] not in renderer.stop_ids):
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
