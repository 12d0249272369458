"""Where a call goes: found by lineage, proved by tokens, and where it forks, why.

A straight continuation leaves `find_attach_point` early; everything about reasons runs only once a fork is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollyard.core.call import Call, CallRecord, Continuation, Edge
from rollyard.core.message import Message
from rollyard.core.node import BreakReason, Node
from rollyard.trajectory.call_index import Ledger
from rollyard.trajectory.fork_reason import compare_echo, compare_history, quotes
from rollyard.trajectory.graph import WIDTH, Graph
from rollyard.trajectory.lineage import ROOT, START, WalkStep, is_part, is_quoted, repeats

HistoryChange = tuple[BreakReason, int | None]


class Match(NamedTuple):
    """What a request's words say before it is answered: the call it goes on from, or why there is none (None for a plain
    repetition). `steps` is the walk behind it, good for as long as the graph has `size` nodes."""

    steps: Sequence[WalkStep]
    size: int
    continues: Continuation | None
    reason: str | None
    history: HistoryChange | None = None  # how it differs from its thread's latest call, where that was looked at
    # Where it goes, unless its tokens say otherwise, when not even its first words are known
    root: AttachPoint | None = None


class AttachPoint(NamedTuple):
    """Below `step.node`, after `end` known tokens. `answer` is the nearest recorded answer above; `orphan` an answer that
    the request quotes and that is not recorded."""

    step: WalkStep
    end: int
    answer: Node | None
    edge: Edge
    parent_call_id: str | None
    reason: str | None = None
    mismatch: int | None = None
    orphan: Message | None = None

    @property
    def below(self) -> int | None:
        return None if self.step.node == ROOT else self.step.node

    def new_messages(self, call: Call) -> list[Message]:
        """What the request adds, less what only repeats a part of the answer above."""
        above = self.answer.message if self.answer is not None else None
        return [message for message in call.messages[self.step.consumed :] if not repeats(above, message)]


_NOWHERE = AttachPoint(START, 0, None, "root", None)


def match(graph: Graph, ledger: Ledger, call: Call) -> Match:
    """The deepest answered call whose history and answer a request begins with, however it was re-serialised. An answer that
    the agent edited is still that answer where its tool-call ids say so and all around it is as it was; a request that
    changed anything else goes on from nothing: what it says must reach the model."""
    steps = graph.lineage.walk(call.messages, call.tools_digest)
    size = len(graph.nodes)
    if not steps:
        return _match_nothing(graph, ledger, call, size)
    found = next((at for step in reversed(steps) if (at := _answer_on(graph, step)) is not None), None)
    if found is None:
        return Match(steps, size, None, *_reason(graph, ledger, call, steps))
    answer = graph.nodes[found.node]
    new: list[Message] = []
    exact, edited = found.exact and (not found.split or _is_whole(graph, call, found)), found.edited
    for message in call.messages[found.consumed :]:
        if not repeats(answer.message, message):
            new.append(message)
            continue
        exact = exact and is_part(answer.message, message)
        edited = edited or not is_quoted(answer.message, message)
    if any(message.role == "assistant" for message in new):
        return Match(steps, size, None, *_reason(graph, ledger, call, steps))
    if not exact:
        echo = compare_echo(_find_echoes(graph, call, found), found.skipped)
        return Match(steps, size, None, "history_edited" if echo == "bridge_unproven" else echo)
    continues = Continuation(
        call_id=answer.call_id or "",
        answer=answer.message,
        new=tuple(new),
        deltas=None if graph.end(answer.id) is None else graph.deltas(answer.id),
        sampled=len(answer.ids or ()),
        edited=edited,
    )
    return Match(steps, size, continues, None)


def _match_nothing(graph: Graph, ledger: Ledger, call: Call, size: int) -> Match:
    latest = ledger.latest(call.thread)
    if latest is not None and len(call.messages) == 1 and latest.tools_digest == call.tools_digest:
        history: HistoryChange | None = "new_root", None  # its one message begins nothing that is recorded
    else:
        history = _compare_latest(graph, call, latest)
    root = _fork(graph, ledger, call, _NOWHERE, _Evidence((), None, latest, None, history))
    return Match((), size, None, root.reason, history, root if root.mismatch is None else None)


def _answer_on(graph: Graph, step: WalkStep) -> WalkStep | None:
    """The last recorded answer that a walk passed."""
    at: WalkStep | None = step
    while at is not None and at.node != ROOT and not graph.nodes[at.node].sampled:
        at = at.previous
    return None if at is None or at.node == ROOT else at


def _is_whole(graph: Graph, call: Call, step: WalkStep) -> bool:
    """Whether every part of each split answer came back."""
    sent = {tool.id for message in call.messages if message.role == "assistant" for tool in message.tool_calls}
    return all(
        tool.id in sent
        for node, echo in _find_echoes(graph, call, step)
        if node.sampled and is_part(node.message, echo)
        for tool in node.message.tool_calls
    )


def _reason(
    graph: Graph, ledger: Ledger, call: Call, steps: Sequence[WalkStep]
) -> tuple[str | None, HistoryChange | None]:
    """Why a request goes on from no recorded answer, and how it differs from its thread's latest call."""
    if _first_asked(ledger, call, steps) is not None:
        return None, None
    answer = graph.answer_above(steps[-1].node)
    here = AttachPoint(steps[-1], 0, answer, "root", None)
    latest = ledger.latest(call.thread)
    history = _compare_latest(graph, call, latest)
    return _fork(graph, ledger, call, here, _Evidence(steps, answer, latest, None, history)).reason, history


def _compare_latest(graph: Graph, call: Call, latest: CallRecord | None) -> HistoryChange | None:
    if latest is None or latest.leaf is None:
        return None
    same_tools = latest.tools_digest == call.tools_digest
    return compare_history(graph.messages(latest.leaf), call.messages, same_tools)


def find_attach_point(
    graph: Graph, ledger: Ledger, call: Call, digest: bytes, packed: bytes | None, before: Match | None = None
) -> AttachPoint:
    """`digest` names the request's body; `packed` are the ids of its prompt, None where they are unknown; `before` is its
    match from before it was answered."""
    history: HistoryChange | None = None
    if before is not None and before.size == len(graph.nodes):
        if (
            before.root is not None
            and (found := _place_root(graph, ledger, call, digest, packed, before.root)) is not None
        ):
            return found
        steps, history = before.steps, before.history
    else:
        steps = graph.lineage.walk(call.messages, call.tools_digest)
    reached = graph.answer_above(steps[-1].node) if steps else None
    if packed is None:
        step, end = max(steps, key=lambda at: (at.consumed, at.node), default=START), 0
    else:
        step, end = _prove(graph, steps, reached, packed, len(call.messages))
    here = AttachPoint(step, end, graph.answer_above(step.node), "root", None)
    failed = ledger.note_failure(digest)
    if failed is not None:
        return here._replace(edge="retry_of", parent_call_id=failed)
    repeated = _first_asked(ledger, call, (step,)) or _first_asked(ledger, call, steps)
    if repeated is not None:
        return _retry(graph, here._replace(edge="retry_of", parent_call_id=repeated), call, steps, packed)
    quoted = [message for message in here.new_messages(call) if message.role == "assistant"]
    if here.answer is not None and here.answer is reached and not quoted and step.node not in ledger.at_prompt:
        return here._replace(edge="extends", parent_call_id=here.answer.call_id)
    if quoted and not graph.lineage.knows(quoted[-1]):
        here = here._replace(orphan=quoted[-1])
    return _fork(graph, ledger, call, here, _Evidence(steps, reached, ledger.latest(call.thread), packed, history))


def _place_root(
    graph: Graph, ledger: Ledger, call: Call, digest: bytes, packed: bytes | None, root: AttachPoint
) -> AttachPoint | None:
    """A call that begins anew, as nearly every first one does; None where its tokens, or what was said of it, lead elsewhere."""
    if call.break_reason is not None or (packed is not None and graph.longest_prefix(packed, 0) is not None):
        return None
    if ledger.note_failure(digest) is not None or any(message.role == "assistant" for message in call.messages):
        return None
    return root


def _first_asked(ledger: Ledger, call: Call, steps: Sequence[WalkStep]) -> str | None:
    """The call that was answered where a request ends: the request says the same again."""
    count = len(call.messages)
    return next(
        (ledger.at_prompt[at.node] for at in reversed(steps) if at.consumed == count and at.node in ledger.at_prompt),
        None,
    )


def _retry(graph: Graph, here: AttachPoint, call: Call, steps: Sequence[WalkStep], packed: bytes | None) -> AttachPoint:
    """The same words again. Where they became other tokens the retry stands beside what it repeats, and says so."""
    said = next(at for at in reversed(steps) if at.consumed == len(call.messages))
    if packed is None or here.step.node in {at.node for at in steps}:
        return here
    reason = call.break_reason or "bridge_unproven"
    return here._replace(reason=reason, mismatch=graph.mismatch(said.node, packed))


def _prove(
    graph: Graph, steps: Sequence[WalkStep], reached: Node | None, packed: bytes, count: int
) -> tuple[WalkStep, int]:
    """The deepest step whose ids the prompt begins with; failing the lineage, the longest call that it begins with."""
    best, end = START, 0
    for step in steps:
        at, known = graph.climb(step, packed)
        if (known, at.consumed) > (end, best.consumed):
            best, end = at, known
    if reached is None or graph.answer_above(best.node) is not reached:
        leaf = graph.longest_prefix(packed, end)
        if leaf is not None:
            consumed = max(0, min(len(graph.path(leaf)), count - 1))
            best, end = WalkStep(leaf, consumed, START, exact=False), graph.end(leaf) or 0
    total = len(packed) // WIDTH
    while end < total and best.consumed >= count and best.previous is not None:  # the delta needs a message to lie on
        best = best.previous
        end = graph.end(best.node) or 0
    return best, end


class _Evidence(NamedTuple):
    """What is known of a call that forks: how far its words were recognised, and its thread's latest call."""

    steps: Sequence[WalkStep]
    reached: Node | None
    latest: CallRecord | None
    packed: bytes | None
    history: HistoryChange | None  # as compared before, where it was


def _fork(graph: Graph, ledger: Ledger, call: Call, here: AttachPoint, seen: _Evidence) -> AttachPoint:
    """Name the edge and the reason. What the policy said of its own prompt is better informed than a comparison."""
    reason, mismatch = _explain_fork(graph, call, here, seen)
    edge: Edge = "root"
    parent: str | None = None
    latest = seen.latest
    if here.answer is not None:
        edge, parent = "extends", here.answer.call_id
        reason = "history_edited" if reason == "new_root" else reason
    elif call.kind == "compaction":
        reason, mismatch = "compaction", None
    elif latest is not None and (latest.kind == "compaction" or _is_quoted(graph, latest, call)):
        edge, parent, reason, mismatch = "compacted_from", latest.id, "compaction", None
    elif (spawner := ledger.spawner(call)) is not None:
        edge, parent, reason, mismatch = "spawned_by", spawner, "new_root", None
    reason = call.break_reason or reason
    return AttachPoint(here.step, here.end, here.answer, edge, parent, reason, mismatch, here.orphan)


def _is_quoted(graph: Graph, latest: CallRecord, call: Call) -> bool:
    return latest.leaf is not None and quotes(graph.nodes[latest.leaf].message, call.messages)


def _explain_fork(graph: Graph, call: Call, here: AttachPoint, seen: _Evidence) -> HistoryChange:
    """The reason, and where it first differs: the token where both sides have ids, else the message."""
    mismatch: int | None = None
    if seen.reached is not None and here.answer is not seen.reached:  # the words were the same, the tokens were not
        before = seen.reached
        reason = compare_echo(_find_echoes(graph, call, seen.steps[-1]), seen.steps[-1].skipped)
    elif seen.latest is not None and seen.latest.leaf is not None:
        before = graph.nodes[seen.latest.leaf]
        reason, mismatch = seen.history or _compare_latest(graph, call, seen.latest) or ("new_root", None)
    else:
        return "new_root", None
    if reason != "new_root" and seen.packed is not None:
        found = graph.mismatch(before.id, seen.packed)
        mismatch = mismatch if found is None else found
    return reason, mismatch


def _find_echoes(graph: Graph, call: Call, step: WalkStep) -> list[tuple[Node, Message]]:
    pairs: list[tuple[Node, Message]] = []
    at: WalkStep | None = step
    while at is not None and at.node != ROOT:
        pairs.append((graph.nodes[at.node], call.messages[at.consumed - 1]))
        at = at.previous
    return pairs
