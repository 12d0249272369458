"""Validators of a trajectory: laws that must hold whatever agent and policy made it, and counters of what happened.

A `LawViolation` is a broken law. A fork, a re-rendered prompt or a missing logprob breaks none: those are counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollyard.core.call import CallRecord
from rollyard.core.node import Node
from rollyard.trajectory.branch import Branch, can_train
from rollyard.trajectory.trajectory import POSITIVE, SENTINEL, Trajectory


class LawViolation(msgspec.Struct, frozen=True):
    """`law` is a short stable name; `where` a call, node or branch."""

    law: str
    rollout_id: str
    where: str
    detail: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory is made of. `breaks` are reasons of forks, `prompts` how prompts came about, `captures` the least
    certain to the most."""

    calls: int
    failed_calls: int
    branches: int
    edges: Mapping[str, int]
    breaks: Mapping[str, int]
    prompts: Mapping[str, int]
    captures: Mapping[str, int]
    tokens: int
    trained_tokens: int


def findings(trajectory: Trajectory) -> list[LawViolation]:
    found = [
        *_structure(trajectory.nodes, trajectory.records),
        *(f for record in trajectory.records for f in _call(trajectory, record)),
        *_branches(trajectory, trajectory.branches),
    ]
    return [LawViolation(law, trajectory.rollout_id, where, detail) for law, where, detail in found]


def counts(trajectory: Trajectory) -> Counts:
    records, branches = trajectory.records, trajectory.branches
    answered = [record for record in records if record.leaf is not None]
    return Counts(
        calls=len(records),
        failed_calls=len(records) - len(answered),
        branches=len(branches),
        edges=Counter(record.edge for record in answered),
        breaks=Counter(r.break_reason for r in answered if r.break_reason not in (None, "new_root")),
        prompts=Counter(record.prompt_source or "unknown" for record in answered),
        captures=Counter(record.capture for record in answered),
        tokens=sum(len(node.ids) for node in trajectory.nodes if node.ids is not None),
        trained_tokens=sum(branch.trained for branch in branches),
    )


_Found = Iterator[tuple[str, str, str]]


def _structure(nodes: Sequence[Node], records: Sequence[CallRecord]) -> _Found:
    leaves = Counter(record.leaf for record in records if record.leaf is not None)
    for place, node in enumerate(nodes):
        where = f"node {node.id}"
        if node.id != place:
            yield "node ids count up", where, f"stands at {place}"
        if node.parent is not None and not 0 <= node.parent < len(nodes):
            yield "a parent exists", where, f"names node {node.parent}"
        if node.sampled and leaves[node.id] != 1:
            yield "an answer belongs to one call", where, f"{leaves[node.id]} calls name it"
        if not node.sampled and (node.logprobs is not None or node.spans):
            yield "only answers are sampled", where, "context with logprobs or versions"
        yield from _arrays(node, where)


def _arrays(node: Node, where: str) -> _Found:
    size = len(node.ids) if node.ids is not None else 0
    if any(not 0 <= start <= end <= size for start, end in node.inserted):
        yield "inserted ranges lie inside", where, f"{node.inserted} of {size}"
    if node.sampled and node.inserted:
        yield "inserted tokens are context", where, "in an answer"
    end = 0
    for span in node.spans:
        if not end <= span.start <= span.end <= size:
            yield "version spans follow each other", where, f"{span.start}:{span.end} of {size}"
        end = span.end
    if node.ids is not None and size and min(node.ids) < 0:
        yield "token ids are not negative", where, str(min(node.ids))
    if node.trainable and node.logprobs:
        if len(node.logprobs) != size:
            yield "one logprob per sampled token", where, f"{len(node.logprobs)} for {size}"
        if not math.isfinite(sum(node.logprobs)):
            yield "logprobs are finite", where, "one is not"
        elif min(node.logprobs) <= SENTINEL or max(node.logprobs) > POSITIVE:
            yield "logprobs are logprobs", where, f"from {min(node.logprobs)} to {max(node.logprobs)}"


def _call(trajectory: Trajectory, record: CallRecord) -> _Found:
    where = f"call {record.id}"
    answer = trajectory.answer(record.id)
    if answer is None:
        return
    if not answer.sampled or answer.call_id != record.id or answer.parent != record.prompt_leaf:
        yield "a call leads to its answer", where, f"node {answer.id}"
    prompt, whole = trajectory.prompt_ids(record.id), trajectory.sequence(record.id)
    if whole is not None and prompt is not None:
        if whole[: len(prompt)] != prompt or whole[len(prompt) :] != answer.ids:
            yield "deltas add up to what the model saw", where, "prompt and answer are not the path"
        used = record.usage
        if used.prompt_tokens is not None and used.prompt_tokens != len(prompt):
            yield "usage counts the prompt", where, f"reported {used.prompt_tokens}, recorded {len(prompt)}"
        if used.completion_tokens is not None and used.completion_tokens != len(answer.ids or ()):
            yield (
                "usage counts the answer",
                where,
                f"reported {used.completion_tokens}, recorded {len(answer.ids or ())}",
            )
    if record.parent_call_id is not None and record.edge == "extends":
        above = trajectory.sequence(record.parent_call_id)
        if above is not None and prompt is not None and prompt[: len(above)] != above:
            yield "a prompt begins with its parent", where, f"parent {record.parent_call_id}"
    start, end = record.version_start, record.version_end
    if start is not None and end is not None and end < start:
        yield "versions do not go back", where, f"{start} to {end}"


def _branches(trajectory: Trajectory, branches: Sequence[Branch]) -> _Found:
    trained: Counter[int] = Counter()
    for branch in branches:
        where = f"branch {branch.index}"
        sizes = {len(branch.mask), len(branch.logprobs), len(branch.versions), len(branch.ids or ())}
        if len(sizes) != 1:
            yield "arrays of a branch are as long as its ids", where, str(sorted(sizes))
        for span in branch.spans:
            masked = branch.mask[span.start : span.end].count(1)
            if masked and not span.sampled:
                yield "only sampled tokens train", where, f"node {span.node}"
            if masked:
                trained[span.node] += 1
    for node in trajectory.nodes:
        if trained[node.id] > 1:
            yield "an answer trains once", f"node {node.id}", f"in {trained[node.id]} branches"
        if can_train(node) and not trained[node.id] and trajectory.sequence(node.call_id or "") is not None:
            yield "an answer that can train does", f"node {node.id}", "in no branch"
