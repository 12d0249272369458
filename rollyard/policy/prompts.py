"""`Prompts`: which earlier call a call continues, and its prompt in exact ids.

Every agent resends its whole history, changed: arguments re-serialised, white space trimmed, reasoning dropped, parallel
calls split. A renderer that tokenised that text again would give other ids than the model sampled. So the messages of a
call are only a lookup key (their digests, step by step down a tree); the ids come from the earlier call, and only what is
new is rendered. Where no earlier call fits, or the renderer cannot prove the bridge, the prompt is rendered in full and the
reason kept.

Ids are held once per strand of conversation: memory grows with new tokens, not with turns times history, and so does work,
but for one look-up per message and one copy of the ids.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from rollyard.core.call import Call, Reply
from rollyard.core.message import Message, ToolResult, tools_digest
from rollyard.policy.renderers.protocol import Renderer, SampledTurn, Unbridgeable
from rollyard.trajectory.trajectory import Trajectory

Check = Literal["never", "always"]


class Known(msgspec.Struct, frozen=True):
    """An answered call: `strand[:end]` are the ids the model saw and sampled, the last `sampled` of them its own."""

    call_id: str
    strand: array[int]
    end: int
    sampled: int
    message: Message


class Thread:
    """The answered calls of one rollout, at the places of their answers in the tree of all messages."""

    def __init__(self) -> None:
        self.by_id: dict[str, Known] = {}
        self.asked: dict[str, int] = {}  # call -> the place of its last message, until it is answered
        self.last: tuple[bytes, Sequence[Message]] | None = None
        self._children: dict[tuple[int, bytes], int] = {}
        self._answers: dict[int, list[Known]] = {}  # several where a request was answered twice alike
        self._parallel: dict[str, Known] = {}  # tool-call id -> the answer that made it among others

    def below(self, place: int, digest: bytes) -> int:
        return self._children.setdefault((place, digest), len(self._children) + 1)

    def answer(self, place: int, known: Known) -> None:
        self._answers.setdefault(self.below(place, known.message.digest), []).append(known)
        self.by_id[known.call_id] = known
        calls = known.message.tool_calls
        if len(calls) > 1:
            self._parallel.update((call.id, known) for call in calls)

    def find(self, tools: bytes, messages: Sequence[Message]) -> tuple[Sequence[Message], int, Known | None, int]:
        """The messages (with split answers put together), their last place, the answer they continue, and where it ends
        in them. An answer that is not ours cannot be jumped over."""
        place, known, at = self.walk(tools, messages)
        if known is None and self._parallel:
            whole = regrouped(messages, self._parallel)
            if len(whole) != len(messages):
                messages = whole
                place, known, at = self.walk(tools, messages)
        return messages, place, known, at

    def walk(self, tools: bytes, messages: Sequence[Message]) -> tuple[int, Known | None, int]:
        place, last, at = self.below(0, tools), 0, 0
        for number, message in enumerate(messages, start=1):
            place = self.below(place, message.digest)
            if message.role == "assistant":
                last, at = place, number
        found = self._answers.get(last)
        return place, None if found is None else quoted(found, messages[at - 1]), at


class Prompts:
    """Prompts for all rollouts of one policy. `check="always"` renders in full beside each bridge and counts where the two
    differ, and changes nothing."""

    def __init__(self, renderer: Renderer, *, check: Check = "never") -> None:
        self.renderer = renderer
        self.check = check
        self.counts: Counter[str] = Counter()
        self._threads: dict[str, Thread] = {}

    def prepare(self, call: Call) -> Call:
        """The call with `prompt_ids`, where they came from, and why they could not be bridged when they were not."""
        thread = self._threads.setdefault(call.rollout_id, Thread())
        tools = call.tools_digest or tools_digest(call.tools)
        messages, place, known, at = thread.find(tools, call.messages)
        prepared = None
        if known is not None:
            prepared = self._bridged(call, known, messages, at)
        if prepared is None:
            reason = break_reason(call, thread, tools, messages) if known is None else "bridge_unproven"
            prepared = self._rendered(call, thread, messages, reason)
        thread.asked[call.id] = place
        thread.last = tools, messages
        return prepared

    def answered(self, call: Call, reply: Reply) -> None:
        """Remembers what was sampled, so that a later call can go on from it."""
        thread = self._threads.get(call.rollout_id)
        place = thread.asked.pop(call.id, None) if thread is not None else None
        if thread is None or place is None or call.prompt_ids is None or reply.completion_ids is None:
            return
        strand = extended(thread, call, call.prompt_ids, reply.completion_ids)
        thread.answer(place, Known(call.id, strand, len(strand), len(reply.completion_ids), reply.message))

    def recall(self, trajectory: Trajectory) -> None:
        """What was sampled before a restart, from the record of it."""
        thread = self._threads[trajectory.rollout_id] = Thread()
        for record in trajectory.records:
            answer, whole = trajectory.answer(record.id), trajectory.sequence(record.id)
            if answer is None or answer.ids is None or whole is None:
                continue
            place, _, _ = thread.walk(record.tools_digest, trajectory.messages(record.id))
            parent = thread.by_id.get(record.parent_call_id or "")
            strand = whole
            if parent is not None and parent.strand == whole[: len(parent.strand)]:
                strand = parent.strand
                strand.extend(whole[len(strand) :])
            thread.answer(place, Known(record.id, strand, len(whole), len(answer.ids), answer.message))

    def known(self, rollout_id: str) -> tuple[Known, ...]:
        """The answered calls of a rollout, in order."""
        thread = self._threads.get(rollout_id)
        return tuple(thread.by_id.values()) if thread is not None else ()

    def forget(self, rollout_id: str) -> None:
        self._threads.pop(rollout_id, None)

    def _bridged(self, call: Call, known: Known, messages: Sequence[Message], at: int) -> Call | None:
        if at == len(messages):
            self.counts["unproven:nothing_new"] += 1
            return None
        try:
            bridged = self.renderer.bridge(turn_of(known), messages[at:], call.tools)
        except Unbridgeable as refusal:
            self.counts[f"unproven:{refusal.reason}"] += 1
            return None
        prompt = known.strand[: known.end]
        prompt.extend(bridged.ids)
        self.counts["bridge"] += 1
        if self.check == "always":
            same = self.renderer.render(messages, call.tools) == prompt
            self.counts["check:same" if same else "check:differs"] += 1
        return msgspec.structs.replace(
            call,
            prompt_ids=prompt,
            prompt_source="bridge",
            parent_call_id=known.call_id,
            inserted=tuple((known.end + a, known.end + b) for a, b in bridged.inserted),
        )

    def _rendered(self, call: Call, thread: Thread, messages: Sequence[Message], reason: str) -> Call:
        prompt = self.renderer.render(messages, call.tools)
        self.counts[f"render:{reason}"] += 1
        return msgspec.structs.replace(
            call,
            prompt_ids=prompt,
            prompt_source="render",
            parent_call_id=prefix_of(thread, prompt),
            break_reason=None if reason == "new_root" else reason,
        )


def quoted(found: Sequence[Known], echo: Message) -> Known:
    """Of answers that say the same, the one whose tool calls the agent quotes; the last where it quotes none."""
    if len(found) > 1:
        ids = [call.id for call in echo.tool_calls]
        for known in reversed(found):
            if [call.id for call in known.message.tool_calls] == ids:
                return known
    return found[-1]


def turn_of(known: Known) -> SampledTurn:
    begun = known.end - known.sampled
    return SampledTurn(known.strand, begun, known.strand[begun : known.end], known.message)


def extended(thread: Thread, call: Call, prompt: array[int], completion: array[int]) -> array[int]:
    """The parent's strand made longer in place when this call is the first to go on from its end; a copy otherwise."""
    parent = thread.by_id.get(call.parent_call_id or "")
    if parent is not None and call.prompt_source == "bridge" and parent.end == len(parent.strand):
        strand = parent.strand
        strand.extend(prompt[parent.end :])
    else:
        strand = prompt[:]
    strand.extend(completion)
    return strand


def regrouped(messages: Sequence[Message], parallel: dict[str, Known]) -> Sequence[Message]:
    """Undoes what some agents do to parallel calls: assistant/tool/assistant/tool pairs become one answer and its
    results again, by the tool-call ids that every agent keeps."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        calls = messages[at].tool_calls
        known = parallel.get(calls[0].id) if calls else None
        group = None
        if known is not None and len(calls) < len(known.message.tool_calls):
            group, after = collected(messages, at, {call.id for call in known.message.tool_calls})
            if group is not None:
                out += [known.message, *group]
                at = after
        if group is None:
            out.append(messages[at])
            at += 1
    return out


def collected(messages: Sequence[Message], at: int, wanted: set[str]) -> tuple[list[Message] | None, int]:
    """The tool messages of split calls from `at` on, and where they end; None when they are not a plain split."""
    left = set(wanted)
    results: list[Message] = []
    while at < len(messages):
        message = messages[at]
        if message.tool_calls and all(call.id in left for call in message.tool_calls):
            left -= {call.id for call in message.tool_calls}
        elif message.role == "tool" and all(answers(part, wanted) for part in message.parts):
            results.append(message)
        else:
            break
        at += 1
    return (None, at) if left else (results, at)


def answers(part: object, wanted: set[str]) -> bool:
    return isinstance(part, ToolResult) and part.call_id in wanted


def prefix_of(thread: Thread, prompt: array[int]) -> str | None:
    """The call whose ids are the longest exact beginning of this prompt."""
    fitting = [k for k in thread.by_id.values() if k.end <= len(prompt) and prompt[: k.end] == k.strand[: k.end]]
    return max(fitting, key=lambda k: k.end).call_id if fitting else None


def break_reason(call: Call, thread: Thread, tools: bytes, messages: Sequence[Message]) -> str:
    if thread.last is None:
        return "new_root"
    if call.kind in ("compaction", "subagent", "auxiliary"):
        return "compaction" if call.kind == "compaction" else "new_root"
    last_tools, before = thread.last
    if last_tools != tools:
        return "tools_changed"
    if messages and before and messages[0].digest != before[0].digest:
        return "system_changed" if messages[0].role == "system" else "new_root"
    for message, old in zip(messages, before, strict=False):
        if message.digest != old.digest:
            return "assistant_rewritten" if message.role == "assistant" else "history_edited"
    return "assistant_rewritten" if len(messages) > len(before) else "history_edited"
