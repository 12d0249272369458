"""The beginning of a rollout that branches off another one: its parent's calls, answered as they were.

Every call is compared with the parent's before it is answered. Equal digests are equal. Where words differ in the clock and in
ids alone, while count, roles, tool-call ids and tools agree, the call is *pinned*: the policy and the trajectory are given the
parent's words, for the rest of the rollout. Anything else is refused with the difference, and the rollout with it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.branch_point import AFTER, END, RESUME_MARK, BranchPoint
from rollyard.core.call import GIVEN_BY_CALLER, Call, CallRecord, Finish, Reply
from rollyard.core.errors import BranchDiverged, ConfigError, Error
from rollyard.core.ids import new_id
from rollyard.core.message import Image, Message, Opaque, Text, ToolCall, ToolResult, canonical_json
from rollyard.policy.replay_policy import Recorded, chain_of, difference, reply_from, tools_digest_of
from rollyard.wire import CODECS
from rollyard.wire.codec import WireRequest

LONGEST_DIFF = 8000  # characters of it that a failure keeps
_DAYS = "mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
# what a clock or a generator of ids writes: a word with a digit in it, a word of hexadecimal digits, a day, a month, am, pm
_VOLATILE = re.compile(
    rf"[\w.:+-]*\d[\w.:+-]*|\b[0-9a-f]{{4,}}\b|\b(?:{_DAYS})(?:[a-z]*day|uary|ch|il|e|y|ust|t|tember|ober|ember)?\b|\b[ap]m\b",
    re.IGNORECASE,
)


class RecordedCall(msgspec.Struct, frozen=True):
    """A call of the parent's: what the policy saw, and what it said (None at the branch point). `body` is the request as the
    agent sent it, where it is still there."""

    record: CallRecord
    messages: tuple[Message, ...]
    reply: Reply | None
    body: bytes = b""

    @property
    def chain(self) -> bytes:
        return chain_of(self.record.tools_digest, self.messages)


def find_call(recorded: Recorded, text: str) -> CallRecord:
    """A call by its id, the start of its id, or its number in the rollout, as `rollyard show` counts them."""
    if text.isdigit():
        found = [record for record in recorded.records if record.seq == int(text)]
    else:
        found = [record for record in recorded.records if record.id.startswith(text)]
        found = [record for record in found if record.id == text] or found
    if len(found) == 1:
        return found[0]
    last = max((record.seq for record in recorded.records), default=0)
    raise ConfigError(
        f"{'several calls begin' if found else 'no call begins'} with {text!r}",
        hint=f"a call's id, or its number (0 to {last}): `rollyard show ROLLOUT --part calls` lists them",
    )


def find_at(recorded: Recorded, text: str) -> CallRecord:
    """The same, for a call that can be branched at."""
    at = find_call(recorded, text)
    if at.leaf is None:
        raise ConfigError(
            f"call {at.id} was not answered, so what the policy saw there is not known",
            hint=f"`rollyard continue {at.rollout_id}` goes on from the last answer",
        )
    if at.kind != "agent":
        raise ConfigError(f"call {at.id} is a call of kind {at.kind!r}", hint="branch at a call of the agent itself")
    return at


def calls_before(recorded: Recorded, call: str) -> list[CallRecord]:
    """The calls whose answers a branch at `call` is given again, as the parent's agent got them. A side call that was under way
    at the branch point was asked before it."""
    if (turn := next((record for record in recorded.records if record.kind == "user"), None)) is not None:
        raise ConfigError(f"rollout {turn.rollout_id} has turns of a user, and cannot be branched", hint="run it anew")
    answered = [record for record in recorded.records if record.leaf is not None and record.finish != "budget"]
    if call == END:
        return answered
    if call.startswith(AFTER):
        last = find_call(recorded, call.removeprefix(AFTER))
        return [record for record in answered if record.seq <= last.seq]
    at = find_at(recorded, call)
    return [
        record
        for record in answered
        if record.seq < at.seq
        or (record.kind != "agent" and record.seq > at.seq and record.received_at < at.received_at)
    ]


class GivenToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an answer that the caller wrote."""

    name: str
    arguments: Mapping[str, Any] = {}


class GivenAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer that the caller wrote: text, tool calls, or both."""

    text: str = ""
    tool_calls: tuple[GivenToolCall, ...] = ()


def read_answer(text: str) -> GivenAnswer:
    """Plain text, or a JSON object with `text` and `tool_calls`."""
    if not text.lstrip().startswith("{"):
        said = GivenAnswer(text)
    else:
        try:
            said = msgspec.json.decode(text, type=GivenAnswer)
        except BAD_JSON as error:
            shape = '{"text": "...", "tool_calls": [{"name": "...", "arguments": {...}}]}'
            raise ConfigError(f"the answer is not one: {error}", hint=f"plain text, or {shape}") from error
    if not said.text and not said.tool_calls:
        raise ConfigError("the answer says nothing", hint="give it text or tool calls")
    return said


def _said_reply(said: GivenAnswer) -> Reply:
    calls = [ToolCall(new_id("said"), one.name, msgspec.json.encode(one.arguments).decode()) for one in said.tool_calls]
    parts = (*((Text(said.text),) if said.text else ()), *calls)
    finish: Finish = "tool_calls" if calls else "stop"
    return Reply(message=Message("assistant", parts), finish=finish, trainable=False, flaws=(GIVEN_BY_CALLER,))


def open_prefix(
    recorded: Recorded,
    point: BranchPoint,
    bodies: Mapping[str, bytes],
    said: GivenAnswer | None = None,
    *,
    resumed: bool = False,
) -> RecordedPrefix | ResumedPrefix:
    """`bodies` are the requests as the agent sent them, by call; without its body a call is what the trajectory has of it.
    `said` is the answer at the branch point, in place of the policy's. `resumed` is for an agent that goes on from its own
    session."""
    wanted = calls_before(recorded, point.call)
    at = None if point.is_behind else find_at(recorded, point.call)
    if not wanted and at is None:
        raise ConfigError(f"rollout {point.rollout} has no recorded answer to go on from", hint="run its task anew")
    calls: list[RecordedCall] = []
    for record in (*wanted, *((at,) if at is not None else ())):
        node = recorded.answer(record.id)
        answer = None if record is at or node is None else reply_from(record, node, recorded.prompt_ids(record.id))
        body = bodies.get(record.id, b"")
        messages = decode(record, body).messages if body else recorded.messages(record.id)
        calls.append(RecordedCall(record, messages, answer, body))
    answer = None if said is None else _said_reply(said)
    return ResumedPrefix(point, calls, answer) if resumed else RecordedPrefix(point, calls, answer)


def decode(record: CallRecord, body: bytes) -> Call:
    """The parent's call out of its body, as its policy saw it."""
    request = WireRequest(call_id=record.id, rollout_id=record.rollout_id, body=body, headers={}, model="policy")
    return scrub(CODECS[record.dialect].decode(request))


class RecordedPrefix:
    """A `Prefix`, for one rollout."""

    def __init__(self, point: BranchPoint, calls: Sequence[RecordedCall], said: Reply | None = None) -> None:
        self.point = point
        self._said = said
        self.diverged: Error | None = None
        self.pinned = 0
        self._calls = calls
        self._at = calls[-1] if calls[-1].reply is None else None
        self._given: Counter[str] = Counter()
        self._beyond = False

    @property
    def reached(self) -> bool:
        return self._beyond

    def history(self, rollout_id: str) -> Sequence[tuple[Call, Reply]]:
        return ()  # the agent asks for all of it

    def take(self, call: Call) -> tuple[Call, Reply | None]:
        found = self._find_equal(call)
        if found is None and not self._beyond:
            found = self._find_alike(call)
            self.pinned += found is not None
        if found is not None:
            return self._give(call, found)
        past_end = self._at is None and self._is_past_end(call)
        if past_end and call.kind == "agent":
            self._beyond = True
        if not self._beyond and not past_end:
            self.diverged = self.diverged or self._refuse(call)
            raise self.diverged
        return self._pin(call), None

    def unreached_error(self) -> Error:
        given = sum(self._given.values())
        return BranchDiverged(
            f"the agent ended before the branch point {self.point}: it made {given} of the parent's "
            f"{len(self._calls)} calls",
            hint="its log tells why (`rollyard show ROLLOUT --log`); --limits agent=SECONDS gives it more time",
        )

    def _list_left(self) -> list[RecordedCall]:
        return [known for known in self._calls if not self._given[known.record.id]]

    def _find_equal(self, call: Call) -> RecordedCall | None:
        """Equal requests were answered one after the other; they are again. Before the branch point the last answer stands."""
        chain = chain_of(tools_digest_of(call), call.messages)
        equal = [known for known in self._calls if known.chain == chain]
        left = next((known for known in equal if not self._given[known.record.id]), None)
        return left if left is not None or self._beyond or not equal else equal[-1]

    def _find_alike(self, call: Call) -> RecordedCall | None:
        tools = tools_digest_of(call)
        same_tools = (known for known in self._list_left() if known.record.tools_digest == tools)
        return next((known for known in same_tools if are_alike(known.messages, call.messages)), None)

    def _give(self, call: Call, found: RecordedCall) -> tuple[Call, Reply | None]:
        self._given[found.record.id] += 1
        if [m.digest for m in found.messages] != [m.digest for m in call.messages]:
            call = msgspec.structs.replace(call, messages=found.messages)
        reply = found.reply
        if reply is None:
            self._beyond, reply = True, self._said
        now = time.time()
        return call, None if reply is None else msgspec.structs.replace(reply, started_at=now, finished_at=now)

    def _is_past_end(self, call: Call) -> bool:
        return all(known.record.kind != call.kind for known in self._list_left())

    def _pin(self, call: Call) -> Call:
        """Past the branch point: the history that the parent's words stood for once is in the parent's words again."""
        last = self._at or next((known for known in reversed(self._calls) if known.record.kind == "agent"), None)
        return call if not self.pinned or last is None else pin(call, last.messages)

    def _refuse(self, call: Call) -> Error:
        left = self._list_left()
        near = next((known for known in left if len(known.messages) == len(call.messages)), None)
        near = near or (left[0] if left else self._calls[-1])
        return _divergence(
            self.point, near, call, "what the agent's commands print must repeat; run the task anew where it cannot"
        )


class ResumedPrefix:
    """A `Prefix` of an agent that goes on from its own session: all before the branch point is `history`, and the first call that
    it makes must be the parent's there. Parts that hold `RESUME_MARK` are taken out of every call."""

    def __init__(self, point: BranchPoint, calls: Sequence[RecordedCall], said: Reply | None = None) -> None:
        if calls[-1].reply is not None:
            raise ConfigError(
                "an agent's own session cannot be gone on from behind its end", hint="--how replay runs it again"
            )
        self.point = point
        self.diverged: Error | None = None
        self.pinned = 0
        self.reached = False
        self._before, self._at, self._said = calls[:-1], calls[-1], said

    def history(self, rollout_id: str) -> Sequence[tuple[Call, Reply]]:
        return [_as_history(known, rollout_id, known.reply) for known in self._before if known.reply is not None]

    def take(self, call: Call) -> tuple[Call, Reply | None]:
        call = scrub(call)
        if self.reached:
            return pin(call, self._at.messages) if self.pinned else call, None
        if call.kind != "agent":
            return call, None
        if tools_digest_of(call) != self._at.record.tools_digest or not are_alike(self._at.messages, call.messages):
            self.diverged = self.diverged or _divergence(
                self.point, self._at, call, "the agent's session does not bring it back; --how replay runs it again"
            )
            raise self.diverged
        self.reached = True
        pinned = pin(call, self._at.messages)
        self.pinned = int(pinned is not call)
        return pinned, self._said

    def unreached_error(self) -> Error:
        return BranchDiverged(
            f"the agent ended before the branch point {self.point}: it did not go on from its session",
            hint="its log tells why (`rollyard show ROLLOUT --log`); --how replay runs it again",
        )


def _as_history(known: RecordedCall, rollout_id: str, reply: Reply) -> tuple[Call, Reply]:
    """A call of the parent's as one of the child's."""
    record, now = known.record, time.time()
    call = (
        decode(record, known.body)
        if known.body
        else Call(
            id=record.id,
            rollout_id=rollout_id,
            dialect=record.dialect,
            model=record.model_requested,
            messages=known.messages,
            tools_digest=record.tools_digest,
        )
    )
    call = msgspec.structs.replace(
        call,
        id=new_id("call"),
        rollout_id=rollout_id,
        kind=record.kind,
        thread=record.thread,
        parent_thread=record.parent_thread,
        received_at=now,
    )
    return call, msgspec.structs.replace(reply, started_at=now, finished_at=now)


def scrub(call: Call) -> Call:
    """The call without the parts that hold `RESUME_MARK`, in whatever role."""
    if RESUME_MARK.encode() not in call.raw:
        return call
    kept: list[Message] = []
    for message in call.messages:
        parts = tuple(part for part in message.parts if not (isinstance(part, Text) and RESUME_MARK in part.text))
        if len(parts) == len(message.parts):
            kept.append(message)
        elif parts:
            kept.append(Message(message.role, parts, message.name))
    return msgspec.structs.replace(call, messages=tuple(kept))


def pin(call: Call, parent: Sequence[Message]) -> Call:
    """The call with the parent's words at its beginning, where they differ in clock and ids alone."""
    own = call.messages[: len(parent)]
    if not are_alike(parent, own) or all(a.digest == b.digest for a, b in zip(parent, own, strict=True)):
        return call
    return msgspec.structs.replace(call, messages=(*parent, *call.messages[len(own) :]))


def _divergence(point: BranchPoint, near: RecordedCall, call: Call, hint: str) -> Error:
    diff = difference(near.messages, call.messages) or "the messages are the same; the tools offered differ"
    diff = diff if len(diff) <= LONGEST_DIFF else f"{diff[:LONGEST_DIFF]} ..."
    return BranchDiverged(
        f"the call differs from the parent's call {near.record.id} (branch point {point}):\n{diff}", hint=hint
    )


def are_alike(parent: Sequence[Message], own: Sequence[Message]) -> bool:
    """The same count, roles and tool-call ids, and the same words but for what a clock or a generator of ids writes."""
    return len(parent) == len(own) and all(
        a.digest == b.digest or _without_clock(a) == _without_clock(b) for a, b in zip(parent, own, strict=True)
    )


def _without_clock(message: Message) -> list[Any]:
    words: list[Any] = [message.role]
    for part in message.parts:
        if isinstance(part, ToolCall):
            words.append((part.id, part.name, _mask(canonical_json(part.arguments))))
        elif isinstance(part, ToolResult):
            words.append((part.call_id, *(_mask_part(inner) for inner in part.parts)))
    text = "".join(_mask(part.text) for part in message.parts if isinstance(part, Text)).rstrip()
    others = [_mask_part(part) for part in message.parts if isinstance(part, Image | Opaque)]
    return [*words, *others, text]


def _mask_part(part: Text | Image | Opaque) -> Any:
    if isinstance(part, Text):
        return _mask(part.text).rstrip()
    return (part.kind, _mask(part.json)) if isinstance(part, Opaque) else (part.data or part.url or "")


def _mask(text: str) -> str:
    return _VOLATILE.sub("#", text)
