"""A `Branch` is a path from a root to an answer that no call continues: one training sequence.

Its ids are the concatenated deltas of its nodes. A sampled node that several branches share trains in the first one only
(`mask`); elsewhere it is context. Nothing here loops over tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from rollyard.core.call import CallKind, CallRecord, floats, ids
from rollyard.core.experts import RoutedExperts, join_experts
from rollyard.core.message import Message, Role
from rollyard.core.node import Node

BranchKind = Literal[CallKind, "discarded"]
BRANCH_KINDS: tuple[BranchKind, ...] = get_args(BranchKind)


class Span(msgspec.Struct, frozen=True):
    """One message's tokens `start:end` in a branch."""

    node: int
    role: Role
    start: int
    end: int
    sampled: bool = False
    call_id: str | None = None


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """`mask` has a byte per token, 1 where this branch trains it; `logprobs` is 0.0 and `versions` -1 on all other tokens
    (and where a version is unknown). The arrays and `spans` end with the last answer up to which every delta is known;
    `ids` is None when there is no such answer. `kind` is `discarded` for an answer that a retry replaced. `flaws` say why
    tokens of it do not train."""

    index: int
    leaf: int
    kind: BranchKind
    call_ids: tuple[str, ...]
    nodes: tuple[Node, ...]
    spans: tuple[Span, ...] = ()
    ids: array[int] | None = None
    mask: bytes = b""
    logprobs: array[float] = msgspec.field(default_factory=floats)
    versions: array[int] = msgspec.field(default_factory=lambda: array("q"))
    flaws: tuple[str, ...] = ()
    experts: RoutedExperts | None = None  # of each token but the last, where all are known

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(node.message for node in self.nodes)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(node.message.role for node in self.nodes)

    @property
    def trained(self) -> int:
        """How many tokens train here."""
        return self.mask.count(1)

    @property
    def prompt_len(self) -> int:
        """Tokens before the first sampled one."""
        return next((span.start for span in self.spans if span.sampled), 0)


def branches_of(nodes: Sequence[Node], records: Mapping[str, CallRecord]) -> tuple[Branch, ...]:
    """All branches, those that retries replaced last, each group in the order in which their last calls were committed."""
    continued = {node.parent for node in nodes}
    answers: dict[int | None, list[Node]] = {}
    for node in nodes:
        if node.sampled:
            answers.setdefault(node.parent, []).append(node)

    def kind(leaf: Node) -> BranchKind:
        own = records[_call_of(leaf)]
        others = [node for node in answers[leaf.parent] if node.id != leaf.id]
        replaced = any(node.id in continued or records[_call_of(node)].seq > own.seq for node in others)
        return "discarded" if replaced else own.kind

    kinds: dict[int, BranchKind] = {leaf.id: kind(leaf) for leaf in _list_leaves(nodes)}
    order = sorted(kinds, key=lambda leaf: (kinds[leaf] == "discarded", records[_call_of(nodes[leaf])].seq))
    trained: set[int] = set()
    return tuple(_branch(index, nodes[leaf], kinds[leaf], nodes, records, trained) for index, leaf in enumerate(order))


def _list_leaves(nodes: Sequence[Node]) -> list[Node]:
    """Answers with no answer below them."""
    inner: set[int] = set()
    for node in nodes:
        if node.sampled:
            parent = node.parent
            while parent is not None and parent not in inner:
                inner.add(parent)
                parent = nodes[parent].parent
    return [node for node in nodes if node.sampled and node.id not in inner]


def _call_of(node: Node) -> str:
    assert node.call_id is not None, "a sampled node names its call"
    return node.call_id


def _branch(
    index: int,
    leaf: Node,
    kind: BranchKind,
    nodes: Sequence[Node],
    records: Mapping[str, CallRecord],
    trained: set[int],
) -> Branch:
    path = path_to(leaf, nodes)
    call_ids = tuple(_call_of(node) for node in path if node.sampled)
    known = _known_part(path)
    flaws = _flaws(path, records)
    if len(known) < len(path):
        flaws = (f"token ids are known for {len(known)} of {len(path)} messages", *flaws)
    if not known:
        return Branch(index=index, leaf=leaf.id, kind=kind, call_ids=call_ids, nodes=path, flaws=flaws)
    every, mask, logprobs, versions, spans = ids(), bytearray(), floats(), array("q"), list[Span]()
    for node in known:
        start = len(every)
        every.extend(node.ids or ())
        size = len(every) - start
        spans.append(Span(node.id, node.message.role, start, len(every), node.sampled, node.call_id))
        trains = can_train(node) and node.id not in trained
        if trains:
            trained.add(node.id)
        mask += (b"\1" if trains else b"\0") * size
        logprobs.extend(node.logprobs if can_train(node) and node.logprobs else floats((0.0,)) * size)
        versions.extend(_versions(node, size))
    return Branch(
        index=index,
        leaf=leaf.id,
        kind=kind,
        call_ids=call_ids,
        nodes=path,
        spans=tuple(spans),
        ids=every,
        mask=bytes(mask),
        logprobs=logprobs,
        versions=versions,
        flaws=flaws,
        experts=join_experts(node.experts for node in known if node.ids),
    )


def path_to(leaf: Node, nodes: Sequence[Node]) -> tuple[Node, ...]:
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(nodes[parent])
    return tuple(reversed(path))


def _known_part(path: Sequence[Node]) -> Sequence[Node]:
    """The path up to the last answer before the first unknown delta."""
    size = next((index for index, node in enumerate(path) if node.ids is None), len(path))
    while size and not path[size - 1].sampled:
        size -= 1
    return path[:size]


def can_train(node: Node) -> bool:
    """A sampled node trains when its ids and as many logprobs are known and nothing speaks against it."""
    if not (node.sampled and node.trainable and node.ids):
        return False
    return node.logprobs is not None and len(node.logprobs) == len(node.ids)


def _versions(node: Node, size: int) -> array[int]:
    versions = array("q", (-1,)) * size
    for span in node.spans:
        versions[span.start : span.end] = array("q", (span.version,)) * (min(span.end, size) - span.start)
    return versions


def _flaws(path: Sequence[Node], records: Mapping[str, CallRecord]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for node in path:
        if node.sampled and not can_train(node):
            record = records[_call_of(node)]
            for flaw in record.flaws or ("the policy gave no logprobs" if node.trainable else "marked untrainable",):
                found[f"call {record.id}: {flaw}"] = None
    return tuple(found)
