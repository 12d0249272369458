"""The trajectory: a graph of all calls of one rollout.

A path from a root to a leaf is a branch, and a branch is one training sequence: the concatenated deltas are exactly the ids
the model saw and sampled. `add` places a call: its lineage is found by what the messages say (`lineage`), and believed only
where the recorded ids are an exact prefix of the ids the model was given. Where they are not, the path forks, and the reason
is recorded; no sampled token is ever changed. Pure: no I/O, no clock.

Per call, beyond one look-up per message and one comparison of memory, work and memory grow with what is new.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from rollyard.core.branch import Branch, branches_of, path_to
from rollyard.core.breaks import changed_echo, changed_history, quotes
from rollyard.core.call import Call, CallRecord, Edge, Reply, VersionSpan
from rollyard.core.delta import Blob, common_prefix
from rollyard.core.lineage import ROOT, START, Lineage, Step, repeats
from rollyard.core.message import Message
from rollyard.core.node import Added, BreakReason, Match, Node
from rollyard.core.tips import Tip, Tips, keep

__all__ = ["Added", "Branch", "BreakReason", "Match", "Node", "Trajectory"]

WIDTH = array("i").itemsize
SENTINEL = -9999.0  # what an engine writes where it has no logprob
POSITIVE = 1e-3  # above zero by more than rounding


class _Place(NamedTuple):
    """Where a call goes: below `step.node`, after `end` known tokens. `answer` is the nearest recorded answer above it."""

    step: Step
    end: int
    answer: Node | None
    edge: Edge
    parent_call_id: str | None
    reason: str | None = None
    mismatch: int | None = None
    orphan: Message | None = None  # an answer the request quotes and nobody has recorded

    @property
    def below(self) -> int | None:
        return None if self.step.node == ROOT else self.step.node


class Trajectory:
    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._nodes: list[Node] = []
        self._ends: list[int | None] = []  # tokens up to and with each node; None where some delta is unknown
        self._records: dict[str, CallRecord] = {}
        self._prompts: dict[int, str] = {}  # prompt leaf -> the first call that was made there
        self._failed: dict[bytes, str] = {}  # request body -> the call that failed with it
        self._threads: dict[str | None, str] = {}  # thread -> its latest answered call
        self._spawners: dict[str, str] = {}  # thread ("" for any) -> its latest call that asked for tools
        self._awaited: dict[
            bytes | str, list[str]
        ] = {}  # digest or tool-call id of an unseen answer -> calls quoting it
        self._first: dict[bytes, int] = {}  # message digest -> the first node that holds it
        self._tools: set[bytes] = set()
        self._lineage = Lineage()
        self._tips = Tips()

    # reading

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes)

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """In commit order."""
        return tuple(self._records.values())

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Computed anew at each use."""
        return branches_of(self._nodes, self._records)

    def record(self, call_id: str) -> CallRecord:
        return self._records[call_id]

    def messages(self, call_id: str) -> tuple[Message, ...]:
        """The canonical messages that a call's answer was sampled from."""
        leaf = self._records[call_id].prompt_leaf
        return () if leaf is None else tuple(node.message for node in path_to(self._nodes[leaf], self._nodes))

    def answer(self, call_id: str) -> Node | None:
        leaf = self._records[call_id].leaf
        return None if leaf is None else self._nodes[leaf]

    def prompt_ids(self, call_id: str) -> array[int] | None:
        return self._ids(self._records[call_id].prompt_leaf)

    def sequence(self, call_id: str) -> array[int] | None:
        """Prompt and sampled ids of a call, as one; what the next prompt must begin with."""
        return self._ids(self._records[call_id].leaf)

    def _ids(self, node: int | None) -> array[int] | None:
        if node is None or self._ends[node] is None:
            return None
        return array("i", self._packed(node))

    def _packed(self, node: int) -> bytes:
        """The ids of a whole path; every delta on it is known."""
        parts: list[bytes | array[int]] = []
        at: int | None = node
        while at is not None:
            tip = self._tips.get(at)
            if tip is not None and tip.ids is not None:
                parts.append(tip.ids)
                break
            own = self._nodes[at]
            if own.ids:
                parts.append(own.ids)
            at = own.parent
        return b"".join(reversed(parts))

    # placing

    def match(self, call: Call) -> Match | None:
        """The deepest earlier call whose history and answer this request begins with, however it was re-serialised."""
        for step in reversed(self._lineage.walk(call.messages, call.tools_digest)):
            at: Step | None = step
            while at is not None and at.node != ROOT and not self._nodes[at.node].sampled:
                at = at.previous
            if at is None or at.node == ROOT:
                continue
            answer = self._nodes[at.node]
            new = tuple(m for m in call.messages[at.consumed :] if not repeats(answer.message, m))
            return Match(
                call_id=answer.call_id or "",
                leaf=answer.id,
                consumed=at.consumed,
                new=new,
                exact=at.exact,
                skipped=at.skipped,
            )
        return None

    def add(self, call: Call, reply: Reply | None, *, error: str | None = None) -> Added:
        """Place a call and its answer. `reply` is None when it failed: then only its record and body remain."""
        if call.id in self._records:
            raise ValueError(f"call {call.id} was already added")
        prompt = call.prompt_ids if reply is None or reply.prompt_ids is None else reply.prompt_ids
        if reply is not None and reply.break_reason is not None:
            call = replace(call, break_reason=reply.break_reason)
        packed = None if prompt is None else prompt.tobytes()
        digest = call.raw_digest or (hashlib.sha256(call.raw).digest() if call.raw else b"")
        place = self._place(call, digest, packed)
        tip = (self._tips.get(place.answer.id) if place.answer is not None else None) or self._tips.latest() or Tip()
        blobs: dict[bytes, Blob] = {}
        request = keep(call.raw, digest, tip.request, blobs)
        response = keep(reply.raw, b"", tip.response, blobs) if reply is not None else None
        if call.tools and call.tools_digest not in self._tools:
            self._tools.add(call.tools_digest)
            blobs[call.tools_digest] = msgspec.msgpack.encode(call.tools)
        nodes: list[Node] = []
        if reply is not None:
            nodes = self._context(call, reply, prompt, place)
            above = nodes[-1].id if nodes else place.below
            nodes.append(self._answer(call, reply, above))
            whole = None if packed is None or self._ends[-1] is None else packed + bytes(nodes[-1].ids or b"")
            replaced = place.answer.id if place.answer is not None else None
            self._tips.put(nodes[-1].id, Tip(whole, request, response or tip.response), instead_of=replaced)
        record = _record(call, reply, error, place, nodes, len(self._records))
        record = replace(record, raw_request=digest, raw_response=response.digest if response is not None else b"")
        self._records[call.id] = record
        self._note(record, place.orphan)
        moved = self._adopt(record)
        if moved:
            nodes += moved
            record = self._records[call.id] = replace(record, new_nodes=tuple(node.id for node in nodes))
        return Added(record=record, nodes=tuple(nodes), blobs=blobs)

    @classmethod
    def restore(cls, rollout_id: str, records: Iterable[CallRecord], nodes: Iterable[Node]) -> Trajectory:
        """The graph as it was, from what `add` handed out. A call whose parent came late is found under it."""
        self = cls(rollout_id)
        ordered = sorted(records, key=lambda record: record.seq)
        tools = {record.id: record.tools_digest for record in ordered}
        self._nodes = sorted(nodes, key=lambda node: node.id)
        for node in self._nodes:
            self._first.setdefault(node.message.digest, node.id)
            self._lineage.insert(node, tools[node.call_id or ""])
            self._ends.append(self._end_of(node))
        for record in ordered:
            self._tools.add(record.tools_digest)
            self._records[record.id] = self._as_placed(record)
            self._note(self._records[record.id], self._unknown_answer(record))
        return self

    def _end_of(self, node: Node) -> int | None:
        """A node's end while ends are being rebuilt; a parent that came late stands behind its child."""
        if node.id < len(self._ends):
            return self._ends[node.id]
        above = 0 if node.parent is None else self._end_of(self._nodes[node.parent])
        return None if above is None or node.ids is None else above + len(node.ids)

    def _as_placed(self, record: CallRecord) -> CallRecord:
        """A stored record with its edge as the nodes have it now."""
        if record.leaf is None:
            return record
        leaf = self._nodes[record.leaf]
        above = self._answer_above(leaf.parent)
        if record.edge == "root" and above is not None:
            return _adopted(record, above.call_id, leaf.parent)
        return record

    def _unknown_answer(self, record: CallRecord) -> Message | None:
        """The last answer a root quotes that nobody has recorded."""
        if record.edge != "root" or record.prompt_leaf is None or record.leaf is None:
            return None
        for node in reversed(path_to(self._nodes[record.prompt_leaf], self._nodes)):
            if node.message.role == "assistant" and not node.sampled:
                return None if self._lineage.knows(node.message) else node.message
        return None

    # nodes

    def _new(self, node: Node, tools: bytes) -> Node:
        first = self._first.setdefault(node.message.digest, node.id)
        if first != node.id and self._nodes[first].message == node.message:
            node = replace(node, message=self._nodes[first].message, same_as=first)
        above = 0 if node.parent is None else self._ends[node.parent]
        self._nodes.append(node)
        self._ends.append(None if above is None or node.ids is None else above + len(node.ids))
        self._lineage.insert(node, tools)
        return node

    def _context(self, call: Call, reply: Reply, prompt: array[int] | None, place: _Place) -> list[Node]:
        """Nodes for the messages that are new; the prompt's delta lies on the last of them."""
        end = place.end
        delta = None if prompt is None else prompt[end:]
        above = place.answer.message if place.answer is not None else None
        messages = [m for m in call.messages[place.step.consumed :] if not repeats(above, m)]
        if not messages and delta:
            messages = [call.messages[-1] if call.messages else Message("user")]
        nodes: list[Node] = []
        parent = place.below
        inserted = reply.inserted or call.inserted
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            ids = delta if last or delta is None else array("i")
            ranges = tuple((a - end, b - end) for a, b in inserted if a >= end) if last and delta is not None else ()
            node = Node(id=len(self._nodes), parent=parent, message=message, call_id=call.id, ids=ids, inserted=ranges)
            nodes.append(self._new(node, call.tools_digest))
            parent = node.id
        return nodes

    def _answer(self, call: Call, reply: Reply, parent: int | None) -> Node:
        spans = reply.spans
        if not spans and reply.version_start is not None and reply.completion_ids is not None:
            spans = (VersionSpan(reply.version_start, 0, len(reply.completion_ids)),)
        node = Node(
            id=len(self._nodes),
            parent=parent,
            message=reply.message,
            sampled=True,
            call_id=call.id,
            ids=reply.completion_ids,
            logprobs=reply.logprobs,
            spans=spans,
            trainable=reply.trainable and not flaws_of(reply),
        )
        return self._new(node, call.tools_digest)

    def _answer_above(self, node: int | None) -> Node | None:
        """The nearest sampled node at or above a place."""
        at = None if node is None or node == ROOT else self._nodes[node]
        while at is not None and not at.sampled:
            at = None if at.parent is None else self._nodes[at.parent]
        return at

    # lineage, proved

    def _place(self, call: Call, digest: bytes, packed: bytes | None) -> _Place:
        steps = self._lineage.walk(call.messages, call.tools_digest)
        reached = self._answer_above(steps[-1].node) if steps else None
        if packed is None:
            step = max(steps, key=lambda at: (at.consumed, at.node), default=START)
            end = 0
        else:
            step, end = self._prove(steps, reached, packed, len(call.messages))
        answer = self._answer_above(step.node)
        failed = self._failed.get(digest)
        if failed is not None:
            return _Place(step, end, answer, "retry_of", failed)
        if step.node in self._prompts and step.consumed == len(call.messages):
            return _Place(step, end, answer, "retry_of", self._prompts[step.node])
        above = answer.message if answer is not None else None
        foreign = [m for m in call.messages[step.consumed :] if m.role == "assistant" and not repeats(above, m)]
        if answer is not None and answer is reached and not foreign and step.node not in self._prompts:
            return _Place(step, end, answer, "extends", answer.call_id)
        orphan = foreign[-1] if foreign and not self._lineage.knows(foreign[-1]) else None
        return self._forked(call, _Place(step, end, answer, "root", None, orphan=orphan), steps, reached, packed)

    def _prove(self, steps: Sequence[Step], reached: Node | None, packed: bytes, count: int) -> tuple[Step, int]:
        """The deepest step whose ids the prompt begins with; failing the lineage, the longest call that it begins with."""
        best, end = START, 0
        for step in steps:
            at, known = self._climb(step, packed)
            if (known, at.consumed) > (end, best.consumed):
                best, end = at, known
        if reached is None or self._answer_above(best.node) is not reached:
            longest = self._longest_prefix(packed, end)
            if longest is not None:
                leaf, consumed = longest
                best, end = Step(leaf, min(consumed, count - 1), START, exact=False), self._ends[leaf] or 0
        total = len(packed) // WIDTH
        while end < total and best.consumed >= count and best.previous is not None:
            best = best.previous
            end = 0 if best.node == ROOT else self._ends[best.node] or 0
        return best, end

    def _climb(self, step: Step, packed: bytes) -> tuple[Step, int]:
        """Up from a step to where the recorded ids are known and are a prefix."""
        at = step
        while at.node != ROOT and self._ends[at.node] is None:
            at = at.previous or START
        if at.node == ROOT:
            return START, 0
        known = self._packed(at.node)
        if packed.startswith(known):
            return at, len(known) // WIDTH
        same = common_prefix(known, packed) // WIDTH
        while at.node != ROOT and (self._ends[at.node] or 0) > same:
            at = at.previous or START
        return (START, 0) if at.node == ROOT else (at, self._ends[at.node] or 0)

    def _longest_prefix(self, packed: bytes, beyond: int) -> tuple[int, int] | None:
        """The leaf of the longest call, past `beyond` tokens, that a prompt begins with, and how many messages it had."""
        candidates: list[tuple[int, int]] = []
        for record in self._records.values():
            if record.leaf is not None and beyond < (self._ends[record.leaf] or 0) <= len(packed) // WIDTH:
                candidates.append((self._ends[record.leaf] or 0, record.leaf))
        for end, leaf in sorted(candidates, reverse=True):
            last = self._nodes[leaf].ids
            if last and packed[(end - len(last)) * WIDTH : end * WIDTH] != last.tobytes():
                continue
            if packed.startswith(self._packed(leaf)):
                return leaf, len(path_to(self._nodes[leaf], self._nodes))
        return None

    # forks

    def _forked(
        self, call: Call, place: _Place, steps: Sequence[Step], reached: Node | None, packed: bytes | None
    ) -> _Place:
        """Name the edge and the reason of a call that does not simply continue one."""
        latest = self._records.get(self._threads.get(call.thread, ""))
        reason, mismatch = self._why(call, place, steps, reached, latest, packed)
        if place.answer is not None:
            reason = "history_edited" if reason == "new_root" else reason
            return self._broken(call, place, "extends", place.answer.call_id, reason, mismatch)
        if call.kind == "compaction":
            return self._broken(call, place, "root", None, "compaction", None)
        if latest is not None and latest.leaf is not None:
            summary = self._nodes[latest.leaf].message
            if latest.kind == "compaction" or quotes(summary, call.messages):
                return self._broken(call, place, "compacted_from", latest.id, "compaction", None)
        spawner = self._spawner(call)
        if spawner is not None:
            return self._broken(call, place, "spawned_by", spawner, "new_root", None)
        return self._broken(call, place, "root", None, reason, mismatch)

    def _broken(
        self, call: Call, place: _Place, edge: Edge, parent: str | None, reason: BreakReason, mismatch: int | None
    ) -> _Place:
        """What the policy said of its own prompt is better informed than a comparison afterwards."""
        return place._replace(edge=edge, parent_call_id=parent, reason=call.break_reason or reason, mismatch=mismatch)

    def _why(
        self,
        call: Call,
        place: _Place,
        steps: Sequence[Step],
        reached: Node | None,
        latest: CallRecord | None,
        packed: bytes | None,
    ) -> tuple[BreakReason, int | None]:
        """The reason, and where it first differs: the token where both sides have ids, else the message."""
        if reached is not None and place.answer is not reached:
            before, mismatch = reached, None
            reason = changed_echo(self._echoes(call, steps), steps[-1].skipped)
        elif latest is not None and latest.leaf is not None:
            before = self._nodes[latest.leaf]
            path = [node.message for node in path_to(before, self._nodes)]
            reason, mismatch = changed_history(path, call.messages, latest.tools_digest == call.tools_digest)
        else:
            return "new_root", None
        if reason != "new_root" and packed is not None and self._ends[before.id] is not None:
            mismatch = common_prefix(self._packed(before.id), packed) // WIDTH
        return reason, mismatch

    def _echoes(self, call: Call, steps: Sequence[Step]) -> list[tuple[Node, Message]]:
        pairs: list[tuple[Node, Message]] = []
        at: Step | None = steps[-1]
        while at is not None and at.node != ROOT:
            pairs.append((self._nodes[at.node], call.messages[at.consumed - 1]))
            at = at.previous
        return pairs

    def _spawner(self, call: Call) -> str | None:
        """The call whose tool calls most likely started this sub-agent."""
        if call.kind != "subagent" and call.parent_thread is None:
            return None
        if call.thread is not None and call.thread in self._threads:
            return None
        return self._spawners.get(call.parent_thread if call.parent_thread is not None else "")

    # what later calls need to know

    def _note(self, record: CallRecord, orphan: Message | None) -> None:
        if record.leaf is None:
            self._failed[record.raw_request or record.id.encode()] = record.id
            return
        self._failed.pop(record.raw_request, None)
        self._threads[record.thread] = record.id
        if record.prompt_leaf is not None:
            self._prompts.setdefault(record.prompt_leaf, record.id)
        if record.kind == "agent" and self._nodes[record.leaf].message.tool_calls:
            self._spawners[record.thread or ""] = self._spawners[""] = record.id
        if orphan is not None:
            for key in _names(orphan):
                self._awaited.setdefault(key, []).append(record.id)

    def _adopt(self, record: CallRecord) -> list[Node]:
        """A parent that came late takes the roots that quote its answer and begin with its tokens (or messages)."""
        if record.leaf is None or not self._awaited:
            return []
        waiting: dict[str, None] = {}
        for key in _names(self._nodes[record.leaf].message):
            waiting.update(dict.fromkeys(self._awaited.pop(key, ())))
        changed: list[Node] = []
        for call_id in waiting:
            changed += self._take(record, self._records[call_id])
        return changed

    def _take(self, parent: CallRecord, child: CallRecord) -> list[Node]:
        assert parent.leaf is not None and child.leaf is not None and child.prompt_leaf is not None
        path = path_to(self._nodes[parent.leaf], self._nodes)
        prompt = path_to(self._nodes[child.prompt_leaf], self._nodes)
        rest = prompt[len(path) :]
        delta: array[int] | None = None
        if not rest or child.tools_digest != parent.tools_digest:
            return []
        if self._ends[child.prompt_leaf] is not None:
            whole, known = self._packed(child.prompt_leaf), self._ends[parent.leaf]
            if known is None or not whole.startswith(self._packed(parent.leaf)):
                return []
            delta = array("i", whole[known * WIDTH :])
        elif any(a.message.digest != b.message.digest for a, b in zip(path, prompt, strict=False)):
            return []
        changed: list[Node] = []
        at = parent.leaf
        for index, old in enumerate(rest):
            ids, inserted = (None if delta is None else array("i")), ()
            if delta is not None and index == len(rest) - 1:
                ids, shift = delta, len(old.ids or ()) - len(delta)
                inserted = tuple((a - shift, b - shift) for a, b in old.inserted if a >= shift)
            node = Node(
                id=len(self._nodes), parent=at, message=old.message, call_id=child.id, ids=ids, inserted=inserted
            )
            changed.append(self._new(node, child.tools_digest))
            at = node.id
        moved = replace(self._nodes[child.leaf], parent=at)
        self._nodes[moved.id] = moved
        self._lineage.insert(moved, child.tools_digest)
        self._records[child.id] = _adopted(child, parent.id, at)
        self._prompts.setdefault(at, child.id)
        return [*changed, moved]


def _adopted(record: CallRecord, parent_call_id: str | None, prompt_leaf: int | None) -> CallRecord:
    return replace(
        record,
        edge="extends",
        parent_call_id=parent_call_id,
        prompt_leaf=prompt_leaf,
        break_reason=None,
        first_mismatch=None,
    )


def _names(answer: Message) -> list[bytes | str]:
    """The keys an answer is awaited under."""
    return [answer.digest, *(call.id for call in answer.tool_calls if call.id)]


def flaws_of(reply: Reply) -> tuple[str, ...]:
    """What the policy found, and what can be seen without knowing the model: an answer with a flaw never trains."""
    found = list(reply.flaws)
    logprobs = reply.logprobs
    if logprobs is None or reply.completion_ids is None:
        return tuple(found)
    if len(logprobs) != len(reply.completion_ids):
        found.append(f"{len(logprobs)} logprobs for {len(reply.completion_ids)} tokens")
    if not math.isfinite(sum(logprobs)):
        found.append("a logprob is not finite")
    elif min(logprobs, default=0.0) <= SENTINEL:
        found.append("a logprob is the engine's placeholder")
    elif max(logprobs, default=0.0) > POSITIVE:
        found.append("a logprob is positive")
    return tuple(dict.fromkeys(found))


def _record(
    call: Call, reply: Reply | None, error: str | None, place: _Place, nodes: Sequence[Node], seq: int
) -> CallRecord:
    record = CallRecord(
        id=call.id,
        rollout_id=call.rollout_id,
        seq=seq,
        dialect=call.dialect,
        kind=call.kind,
        edge=place.edge,
        parent_call_id=place.parent_call_id,
        break_reason=place.reason or call.break_reason,
        first_mismatch=place.mismatch,
        thread=call.thread,
        parent_thread=call.parent_thread,
        model_requested=call.model,
        prompt_leaf=nodes[-1].parent if nodes else place.below,
        tools_digest=call.tools_digest,
        requested=call.sampling,
        error=error,
        received_at=call.received_at,
    )
    if reply is None:
        return replace(record, capture="none", trainable=False)
    return replace(
        record,
        leaf=nodes[-1].id,
        new_nodes=tuple(node.id for node in nodes),
        model_served=reply.model,
        capture=reply.capture,
        prompt_source=reply.prompt_source or call.prompt_source,
        finish=reply.finish,
        stop_reason=reply.stop_reason,
        version_start=reply.version_start,
        version_end=reply.version_end,
        spans=reply.spans,
        effective=reply.sampling,
        logprobs_mode=reply.logprobs_mode,
        engine=reply.engine,
        usage=reply.usage,
        trainable=reply.trainable and not flaws_of(reply),
        flaws=flaws_of(reply),
        started_at=reply.started_at,
        finished_at=reply.finished_at,
    )
