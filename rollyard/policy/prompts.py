"""`Prompts`: which earlier call a call continues, and its prompt in exact ids.

Every agent resends its whole history, changed: arguments re-serialised, white space trimmed, reasoning dropped, parallel
calls split. A renderer that tokenised that text again would give other ids than the model sampled. So the messages of a
call are only a lookup key (their digests, chained); the ids come from the earlier call, and only what is new is rendered.
Where no earlier call fits, or the renderer cannot prove the bridge, the prompt is rendered in full and the reason kept.

Ids are held once per strand of conversation: memory grows with new tokens, not with turns times history.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from rollyard.core.call import Call, Reply
from rollyard.core.message import Message, ToolResult, tools_digest
from rollyard.policy.renderers.protocol import Renderer, Turn, Unbridgeable

Check = Literal["never", "always"]


class Known(msgspec.Struct, frozen=True):
    """An answered call: `strand[:end]` are the ids the model saw and sampled, the last `sampled` of them its own."""

    call_id: str
    strand: array[int]
    end: int
    sampled: int
    message: Message
    depth: int  # messages before its answer


class Thread:
    """The answered calls of one rollout."""

    def __init__(self) -> None:
        self.by_chain: dict[bytes, Known] = {}
        self.by_id: dict[str, Known] = {}
        self.by_tool_call: dict[str, Known] = {}
        self.last: tuple[bytes, tuple[bytes, ...]] | None = None  # tools digest and message digests of the last call


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
        messages = regrouped(call.messages, thread)
        known, at = self._parent(thread, tools, messages)
        reason = None
        if known is not None:
            try:
                return self._bridged(call, known, messages, at)
            except Unbridgeable as refusal:
                reason = "bridge_unproven"
                self.counts[f"unproven:{refusal.reason}"] += 1
        reason = reason or break_reason(call, thread, tools, messages)
        prompt = self.renderer.render(messages, call.tools)
        self.counts[f"render:{reason}"] += 1
        return msgspec.structs.replace(
            call,
            prompt_ids=prompt,
            prompt_source="render",
            parent_call_id=prefix_of(thread, prompt),
            break_reason=None if reason == "new_root" else reason,
        )

    def answered(self, call: Call, reply: Reply) -> None:
        """Remembers what was sampled, so that a later call can go on from it."""
        thread = self._threads.get(call.rollout_id)
        if thread is None or call.prompt_ids is None or reply.completion_ids is None:
            return
        tools = call.tools_digest or tools_digest(call.tools)
        messages = regrouped(call.messages, thread)
        strand, end = self._strand(thread, call, reply.completion_ids)
        known = Known(call.id, strand, end, len(reply.completion_ids), reply.message, len(messages))
        thread.by_chain[chains(tools, (*messages, reply.message))[-1]] = known
        thread.by_id[call.id] = known
        for tool_call in reply.message.tool_calls:
            thread.by_tool_call[tool_call.id] = known
        thread.last = tools, tuple(m.digest for m in messages)

    def known(self, rollout_id: str) -> tuple[Known, ...]:
        """The answered calls of a rollout, in order."""
        thread = self._threads.get(rollout_id)
        return tuple(thread.by_id.values()) if thread is not None else ()

    def forget(self, rollout_id: str) -> None:
        self._threads.pop(rollout_id, None)

    def _parent(self, thread: Thread, tools: bytes, messages: Sequence[Message]) -> tuple[Known | None, int]:
        """The deepest answered call whose messages and answer begin this conversation, and where it ends in it."""
        for at, chain in reversed(list(enumerate(chains(tools, messages), start=1))):
            if messages[at - 1].role == "assistant":
                known = thread.by_chain.get(chain)
                return known, at  # a later answer that is not ours cannot be jumped over
        return None, 0

    def _bridged(self, call: Call, known: Known, messages: Sequence[Message], at: int) -> Call:
        new = messages[at:]
        if not new:
            raise Unbridgeable("nothing_new", "the conversation ends with the model's own answer")
        begun = known.end - known.sampled
        turn = Turn(known.strand[:begun], known.strand[begun : known.end], known.message)
        bridged = self.renderer.bridge(turn, new, call.tools)
        prompt = turn.prompt + turn.completion + bridged.ids
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

    def _strand(self, thread: Thread, call: Call, completion: array[int]) -> tuple[array[int], int]:
        """Extends the parent's strand in place when this call is the first to go on from its end; copies otherwise."""
        prompt = call.prompt_ids
        assert prompt is not None
        parent = thread.by_id.get(call.parent_call_id or "")
        if parent is not None and call.prompt_source == "bridge" and parent.end == len(parent.strand):
            strand = parent.strand
            strand.extend(prompt[parent.end :])
        else:
            strand = prompt[:]
        strand.extend(completion)
        return strand, len(strand)


def chains(tools: bytes, messages: Sequence[Message]) -> list[bytes]:
    """A digest for each beginning of the conversation, tools included."""
    running = hashlib.blake2b(tools, digest_size=16)
    out: list[bytes] = []
    for message in messages:
        running.update(message.digest)
        out.append(running.digest())
    return out


def regrouped(messages: Sequence[Message], thread: Thread) -> tuple[Message, ...]:
    """Undoes what some agents do to parallel calls: assistant/tool/assistant/tool pairs become one answer and its
    results again, by the tool-call ids that every agent keeps."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        known = thread.by_tool_call.get(message.tool_calls[0].id) if message.tool_calls else None
        if known is None or len(message.tool_calls) >= len(known.message.tool_calls):
            out.append(message)
            at += 1
            continue
        wanted = [c.id for c in known.message.tool_calls]
        group, after = collected(messages, at, set(wanted))
        if group is None:
            out.append(message)
            at += 1
            continue
        out.append(known.message)
        out.extend(group)
        at = after
    return tuple(out)


def collected(messages: Sequence[Message], at: int, wanted: set[str]) -> tuple[list[Message] | None, int]:
    """The tool messages of split calls from `at` on, and where they end; None when they are not a plain split."""
    left = set(wanted)
    results: list[Message] = []
    while at < len(messages):
        message = messages[at]
        if message.role == "assistant" and message.tool_calls and all(c.id in left for c in message.tool_calls):
            left -= {c.id for c in message.tool_calls}
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
    fitting = [k for k in thread.by_chain.values() if k.end <= len(prompt) and prompt[: k.end] == k.strand[: k.end]]
    return max(fitting, key=lambda k: k.end).call_id if fitting else None


def break_reason(call: Call, thread: Thread, tools: bytes, messages: Sequence[Message]) -> str:
    if thread.last is None:
        return "new_root"
    if call.kind in ("compaction", "subagent", "auxiliary"):
        return "compaction" if call.kind == "compaction" else "new_root"
    last_tools, digests = thread.last
    if last_tools != tools:
        return "tools_changed"
    if messages and digests and messages[0].digest != digests[0]:
        return "system_changed" if messages[0].role == "system" else "new_root"
    for message, digest in zip(messages, digests, strict=False):
        if message.digest != digest:
            return "assistant_rewritten" if message.role == "assistant" else "history_edited"
    return "assistant_rewritten" if len(messages) > len(digests) else "history_edited"
