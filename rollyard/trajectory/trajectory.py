"""The trajectory: a graph of all calls of one rollout.

A path from a root to a leaf is a branch, and a branch is one training sequence: the concatenated deltas are exactly the ids
the model saw and sampled. `add` places a call: its lineage is found by what the messages say (`lineage`), and believed only
where the recorded ids are an exact prefix of the ids the model was given (`attach`). Where they are not, the path forks,
and the reason is recorded; no sampled token is ever changed. Pure: no I/O, no clock.

Per call, beyond one look-up per message and one comparison of memory, work and memory grow with what is new.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from rollyard.core.call import Call, CallRecord, Reply, VersionSpan
from rollyard.core.delta import Blob
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message
from rollyard.core.node import Added, BreakReason, Node, pack_texts
from rollyard.core.rollout import Turn
from rollyard.trajectory.attach import AttachPoint, Match, find_attach_point, match
from rollyard.trajectory.body_cache import CallBodies, keep
from rollyard.trajectory.branch import Branch, branches_of
from rollyard.trajectory.call_index import Ledger
from rollyard.trajectory.graph import WIDTH, Graph

__all__ = ["Added", "Branch", "BreakReason", "Match", "Node", "Trajectory"]

SENTINEL = -9999.0  # what an engine writes where it has no logprob
POSITIVE = 1e-3  # above zero by more than rounding


class Trajectory:
    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._graph = Graph()
        self._ledger = Ledger()
        self._tools: set[bytes] = set()

    # reading

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._graph.nodes)

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """In commit order."""
        return tuple(self._ledger.records.values())

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Computed anew at each use."""
        return branches_of(self._graph.nodes, self._ledger.records)

    def record(self, call_id: str) -> CallRecord:
        return self._ledger.records[call_id]

    def turns(self) -> list[Turn]:
        """One record for each answered call, in commit order: messages, ids, logprobs, finish."""
        from rollyard.trajectory.turns import turns

        return turns(self)

    def _repr_html_(self) -> str:
        """In a notebook."""
        from rollyard.trajectory.html import draw_trajectory

        return draw_trajectory(self)

    def messages(self, call_id: str) -> tuple[Message, ...]:
        """The canonical messages that a call's answer was sampled from."""
        leaf = self.record(call_id).prompt_leaf
        return () if leaf is None else tuple(self._graph.messages(leaf))

    def answer(self, call_id: str) -> Node | None:
        leaf = self.record(call_id).leaf
        return None if leaf is None else self._graph.nodes[leaf]

    def prompt_ids(self, call_id: str) -> array[int] | None:
        return self._graph.ids(self.record(call_id).prompt_leaf)

    def sequence(self, call_id: str) -> array[int] | None:
        """Prompt and sampled ids of a call, as one: what the next prompt must begin with."""
        return self._graph.ids(self.record(call_id).leaf)

    # placing

    def match(self, call: Call) -> Match:
        """Which answered call a request goes on from, before anything has answered it."""
        return match(self._graph, self._ledger, call)

    def add(
        self,
        call: Call,
        reply: Reply | None,
        *,
        match: Match | None = None,
        error: str | None = None,
        status: int | None = None,
    ) -> Added:
        """Place a call and its answer. `reply` is None when it failed: then only its record and body remain, with why and the
        model server's status. `match` is what `match` gave for the call, so that the walk is not made twice."""
        if call.id in self._ledger.records:
            raise ValueError(f"call {call.id} was already added")
        prompt = call.prompt_ids if reply is None or reply.prompt_ids is None else reply.prompt_ids
        if reply is not None and reply.break_reason is not None:
            call = replace(call, break_reason=reply.break_reason)
        packed = None if prompt is None else prompt.tobytes()
        digest = call.raw_digest or (hashlib.sha256(call.raw).digest() if call.raw else b"")
        found = find_attach_point(self._graph, self._ledger, call, digest, packed, match)
        bodies = self._graph.bodies
        last_bodies = (
            (bodies.get(found.answer.id) if found.answer is not None else None) or bodies.latest() or CallBodies()
        )
        blobs: dict[bytes, Blob] = {}
        request = keep(call.raw, digest, last_bodies.request, blobs)
        response = keep(reply.raw, b"", last_bodies.response, blobs) if reply is not None else None
        if call.tools and call.tools_digest not in self._tools:
            self._tools.add(call.tools_digest)
            blobs[call.tools_digest] = msgspec.msgpack.encode(call.tools)
        nodes: list[Node] = []
        flaws: tuple[str, ...] = ()
        if reply is not None:
            flaws = flaws_of(reply)
            nodes = self._new_nodes(call, reply, prompt, found, trainable=reply.trainable and not flaws)
            replaced = found.answer.id if found.answer is not None else None
            bodies.put(nodes[-1].id, CallBodies(request, response or last_bodies.response), instead_of=replaced)
        bodies = digest, response.digest if response is not None else b""
        seq = len(self._ledger.records)
        record = _record(call, found, nodes, bodies, seq, reply, flaws, error=error, status=status)
        self._ledger.note(record, reply.message if reply is not None else None, found.orphan)
        moved = self._adopt(record, nodes[-1]) if nodes else []
        if moved:
            nodes += moved
            record = self._ledger.records[call.id] = replace(record, new_nodes=tuple(node.id for node in nodes))
        return Added(record=record, nodes=tuple(nodes), blobs=blobs)

    def _new_nodes(
        self, call: Call, reply: Reply, prompt: array[int] | None, found: AttachPoint, *, trainable: bool
    ) -> list[Node]:
        delta = None if prompt is None else prompt[found.end :]
        messages = found.new_messages(call)
        if not messages and delta:
            messages = [call.messages[-1] if call.messages else Message("user")]
        ranges = reply.inserted or call.inserted
        inserted = shift_ranges(ranges, found.end) if ranges and delta is not None else ()
        before, within = (None, None) if reply.experts is None else _divide_experts(reply, found.end, prompt)
        nodes = self._graph.add_context(call.id, call.tools_digest, found.below, messages, delta, inserted, before)
        spans = reply.spans
        if not spans and reply.version_start is not None and reply.completion_ids is not None:
            spans = (VersionSpan(reply.version_start, 0, len(reply.completion_ids)),)
        answer = Node(
            id=len(self._graph.nodes),
            parent=nodes[-1].id if nodes else found.below,
            message=reply.message,
            sampled=True,
            call_id=call.id,
            ids=reply.completion_ids,
            logprobs=reply.logprobs,
            spans=spans,
            packed_texts=pack_texts([token.text for token in reply.tokens]),
            trainable=trainable,
            experts=within,
        )
        return [*nodes, self._graph.add(answer, call.tools_digest)]

    # late parents

    def _adopt(self, parent: CallRecord, answer: Node) -> list[Node]:
        """A parent that came late takes the roots that quote its answer and begin with its tokens (or messages)."""
        changed: list[Node] = []
        for child in self._ledger.take_waiting_for(answer.message):
            changed += self._take(parent, answer, child)
        return changed

    def _take(self, parent: CallRecord, answer: Node, child: CallRecord) -> list[Node]:
        assert child.leaf is not None and child.prompt_leaf is not None
        path, prompt = self._graph.path(answer.id), self._graph.path(child.prompt_leaf)
        rest = prompt[len(path) :]
        if not rest or child.tools_digest != parent.tools_digest:
            return []
        delta: array[int] | None = None
        inserted: tuple[tuple[int, int], ...] = ()
        experts: RoutedExperts | None = None
        if self._graph.end(child.prompt_leaf) is not None:
            whole, known = self._graph.pack(child.prompt_leaf), self._graph.end(answer.id)
            if known is None or not self._graph.prompt_begins(whole, answer.id):
                return []
            delta = array("i", whole[known * WIDTH :])
            inserted = shift_ranges(prompt[-1].inserted, len(prompt[-1].ids or ()) - len(delta))
            experts = prompt[-1].experts
            experts = None if experts is None else experts.rows(len(experts) - len(delta))
        elif any(a.message.digest != b.message.digest for a, b in zip(path, prompt, strict=False)):
            return []
        messages = [node.message for node in rest]
        nodes = self._graph.add_context(child.id, child.tools_digest, answer.id, messages, delta, inserted, experts)
        moved = self._graph.move(child.leaf, nodes[-1].id, child.tools_digest)
        self._ledger.records[child.id] = _adopt_record(child, parent.id, nodes[-1].id)
        self._ledger.at_prompt.setdefault(nodes[-1].id, child.id)
        return [*nodes, moved]

    # coming back

    @classmethod
    def restore(cls, rollout_id: str, records: Iterable[CallRecord], nodes: Iterable[Node]) -> Trajectory:
        """The graph as it was, from what `add` handed out. A call whose parent came late is found under it."""
        self = cls(rollout_id)
        ordered = sorted(records, key=lambda record: record.seq)
        tools = {record.id: record.tools_digest for record in ordered}
        self._graph.restore((node, tools[node.call_id or ""]) for node in nodes)
        for record in ordered:
            self._tools.add(record.tools_digest)
            answer = None if record.leaf is None else self._graph.nodes[record.leaf].message
            record = self._as_placed(record)
            self._ledger.note(record, answer, self._unknown_answer(record))
        return self

    def _as_placed(self, record: CallRecord) -> CallRecord:
        """A stored record with its edge as the nodes have it now: an answer that was moved has another parent."""
        if record.leaf is None or self._graph.nodes[record.leaf].parent == record.prompt_leaf:
            return record
        prompt_leaf = self._graph.nodes[record.leaf].parent
        above = self._graph.answer_above(prompt_leaf)
        return _adopt_record(record, above.call_id if above is not None else None, prompt_leaf)

    def _unknown_answer(self, record: CallRecord) -> Message | None:
        """The last answer that a forked call quotes and that is not recorded."""
        if record.break_reason is None or record.prompt_leaf is None or record.leaf is None:
            return None
        for node in reversed(self._graph.path(record.prompt_leaf)):
            if node.sampled:
                return None
            if node.message.role == "assistant":
                return None if self._graph.lineage.knows(node.message) else node.message
        return None


def shift_ranges(ranges: Iterable[tuple[int, int]], by: int) -> tuple[tuple[int, int], ...]:
    """Ranges counted from `by` on; those before it are gone."""
    return tuple((start - by, end - by) for start, end in ranges if start >= by)


def _divide_experts(
    reply: Reply, end: int, prompt: array[int] | None
) -> tuple[RoutedExperts | None, RoutedExperts | None]:
    """Those of the prompt's new tokens, which begin at `end`, and those of the answer."""
    experts = reply.experts
    known = reply.prompt_ids is not None and reply.completion_ids is not None
    if experts is None or prompt is None or not known or _experts_flaw(reply) is not None:
        return None, None
    return experts.rows(max(0, end - 1), len(prompt) - 1), experts.rows(len(prompt) - 1)


def _experts_flaw(reply: Reply) -> str | None:
    if reply.experts is None or reply.prompt_ids is None or reply.completion_ids is None:
        return None
    tokens = len(reply.prompt_ids) + len(reply.completion_ids)
    return (
        None
        if len(reply.experts) == tokens - 1
        else f"routed experts of {len(reply.experts)} tokens, {tokens - 1} wanted"
    )


def _adopt_record(record: CallRecord, parent_call_id: str | None, prompt_leaf: int | None) -> CallRecord:
    return replace(
        record,
        edge="extends",
        parent_call_id=parent_call_id,
        prompt_leaf=prompt_leaf,
        break_reason=None,
        first_mismatch=None,
    )


def flaws_of(reply: Reply) -> tuple[str, ...]:
    """What the policy found, and what can be seen without knowing the model: an answer with a flaw never trains."""
    found = list(reply.flaws)
    if reply.experts is not None and (flaw := _experts_flaw(reply)) is not None:
        found.append(flaw)
    if reply.logprobs is not None and reply.completion_ids is not None:
        logprobs = reply.logprobs.tolist()
        if len(logprobs) != len(reply.completion_ids):
            found.append(f"{len(logprobs)} logprobs for {len(reply.completion_ids)} tokens")
        total = sum(logprobs)
        if not math.isfinite(total):
            found.append("a logprob is not finite")
        elif (
            highest := max(logprobs, default=0.0)
        ) > POSITIVE or total <= SENTINEL / 2:  # else none can be a placeholder
            if min(logprobs, default=0.0) <= SENTINEL:
                found.append("a logprob is the engine's placeholder")
            elif highest > POSITIVE:
                found.append("a logprob is positive")
    return tuple(dict.fromkeys(found)) if found else ()


_NO_REPLY = Reply(message=Message("assistant"), capture="none", trainable=False)


def _record(
    call: Call,
    found: AttachPoint,
    nodes: Sequence[Node],
    bodies: tuple[bytes, bytes],
    seq: int,
    reply: Reply | None,
    flaws: tuple[str, ...],
    *,
    error: str | None,
    status: int | None,
) -> CallRecord:
    answer = _NO_REPLY if reply is None else reply
    return CallRecord(
        id=call.id,
        rollout_id=call.rollout_id,
        seq=seq,
        dialect=call.dialect,
        kind=call.kind,
        edge=found.edge,
        parent_call_id=found.parent_call_id,
        break_reason=found.reason or call.break_reason,
        first_mismatch=found.mismatch,
        thread=call.thread,
        parent_thread=call.parent_thread,
        model_requested=call.model,
        model_served=answer.model,
        leaf=nodes[-1].id if nodes else None,
        prompt_leaf=nodes[-1].parent if nodes else found.below,
        new_nodes=tuple([node.id for node in nodes]),
        tools_digest=call.tools_digest,
        capture=answer.capture,
        prompt_source=None if reply is None else reply.prompt_source or call.prompt_source,
        finish=None if reply is None else reply.finish,
        stop_reason=answer.stop_reason,
        version_start=answer.version_start,
        version_end=answer.version_end,
        spans=answer.spans,
        requested=call.sampling,
        effective=answer.sampling,
        logprobs_mode=answer.logprobs_mode,
        engine=answer.engine,
        usage=answer.usage,
        trainable=answer.trainable and not flaws,
        flaws=flaws,
        error=error,
        status=status,
        raw_request=bodies[0],
        raw_response=bodies[1],
        received_at=call.received_at,
        started_at=answer.started_at,
        finished_at=answer.finished_at,
    )
