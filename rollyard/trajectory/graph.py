"""The nodes of a trajectory, with where each path ends in tokens, and proofs by comparing memory.

Positions in tokens are counted from the root of a path; packed ids are bytes, so that a prefix is one comparison.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from rollyard.core.delta import common_prefix
from rollyard.core.experts import RoutedExperts
from rollyard.core.message import Message
from rollyard.core.node import Node
from rollyard.trajectory.body_cache import BodyCache
from rollyard.trajectory.branch import path_to
from rollyard.trajectory.lineage import ROOT, START, Lineage, WalkStep

WIDTH = array("i").itemsize


class Graph:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.lineage = Lineage()
        self.bodies = BodyCache()
        self._ends: list[int | None] = []  # tokens up to and with each node; None where some delta is unknown
        self._first: dict[bytes, int] = {}  # message digest -> the first node that holds it
        self._answers: list[tuple[int, int]] = []  # (end, node) of the sampled ones whose end is known, in order
        self._path: tuple[int, tuple[array[int], ...]] = (ROOT, ())  # a node, and the deltas down to it

    def restore(self, nodes: Iterable[tuple[Node, bytes]]) -> None:
        """Take nodes with their tools, in the order of their ids."""
        pairs = sorted(nodes, key=lambda pair: pair[0].id)
        self.nodes = [node for node, _ in pairs]
        for node, tools in pairs:
            self._first.setdefault(node.message.digest, node.id)
            self.lineage.insert(node, tools)
            end = self._rebuilt_end(node)
            self._ends.append(end)
            if node.sampled and end is not None:
                insort(self._answers, (end, node.id))

    def _rebuilt_end(self, node: Node) -> int | None:
        """A parent that came late stands behind its child."""
        if node.id < len(self._ends):
            return self._ends[node.id]
        above = 0 if node.parent is None else self._rebuilt_end(self.nodes[node.parent])
        return None if above is None or node.ids is None else above + len(node.ids)

    def add(self, node: Node, tools: bytes) -> Node:
        """Append a node, whose id is the next one; an equal message that is known already is shared."""
        first = self._first.setdefault(node.message.digest, node.id)
        if first != node.id and self.nodes[first].message == node.message:
            node = replace(node, message=self.nodes[first].message, same_as=first)
        above = 0 if node.parent is None else self._ends[node.parent]
        self.nodes.append(node)
        end = None if above is None or node.ids is None else above + len(node.ids)
        self._ends.append(end)
        if node.sampled and end is not None:
            insort(self._answers, (end, node.id))
        self.lineage.insert(node, tools)
        return node

    def add_context(
        self,
        call_id: str,
        tools: bytes,
        below: int | None,
        messages: Sequence[Message],
        delta: array[int] | None,
        inserted: tuple[tuple[int, int], ...],
        experts: RoutedExperts | None = None,
    ) -> list[Node]:
        """Nodes for a prompt's new messages; its delta, with what is known of its tokens, lies on the last of them."""
        added: list[Node] = []
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            node = Node(
                id=len(self.nodes),
                parent=below,
                message=message,
                call_id=call_id,
                ids=delta if last or delta is None else array("i"),
                inserted=inserted if last else (),
                experts=experts if last else None,
            )
            added.append(self.add(node, tools))
            below = node.id
        return added

    def move(self, node: int, parent: int, tools: bytes) -> Node:
        """Place a node below a parent that came late."""
        moved = replace(self.nodes[node], parent=parent)
        self.nodes[node] = moved
        self._path = ROOT, ()
        self.lineage.insert(moved, tools)
        return moved

    def end(self, node: int) -> int | None:
        return 0 if node == ROOT else self._ends[node]

    def path(self, node: int) -> tuple[Node, ...]:
        return path_to(self.nodes[node], self.nodes)

    def messages(self, node: int) -> list[Message]:
        return [at.message for at in self.path(node)]

    def ids(self, node: int | None) -> array[int] | None:
        """The ids of a whole path, or None where some are unknown."""
        return None if node is None or self._ends[node] is None else array("i", self.pack(node))

    def pack(self, node: int) -> bytes:
        """The same as bytes; every delta on the path is known."""
        return b"".join(self.deltas(node))

    def prompt_begins(self, packed: bytes, node: int) -> bool:
        """Whether a prompt begins with the ids of a path, all of which are known."""
        at = 0
        for delta in self.deltas(node):
            if not packed.startswith(delta, at):
                return False
            at += len(delta) * WIDTH
        return True

    def deltas(self, node: int) -> tuple[array[int], ...]:
        """The known deltas of a path, in order, as the nodes hold them. The path that was wanted last is remembered: the next
        one is nearly always that, or goes on from it."""
        last, known = self._path
        parts: list[array[int]] = []
        at: int | None = node
        while at is not None and at != last:
            own = self.nodes[at]
            if own.ids:
                parts.append(own.ids)
            at = own.parent
        parts.reverse()
        found = tuple(parts) if at is None else (*known, *parts)
        self._path = node, found
        return found

    def answer_above(self, node: int | None) -> Node | None:
        """The nearest sampled node at or above a place."""
        at = None if node is None or node == ROOT else self.nodes[node]
        while at is not None and not at.sampled:
            at = None if at.parent is None else self.nodes[at.parent]
        return at

    def mismatch(self, node: int, packed: bytes) -> int | None:
        """The first token at which a prompt leaves a path."""
        return None if self._ends[node] is None else common_prefix(self.pack(node), packed) // WIDTH

    def climb(self, step: WalkStep, packed: bytes) -> tuple[WalkStep, int]:
        """Up from a step to where the recorded ids are known and are a prefix of the prompt."""
        at = step
        while at.node != ROOT and self._ends[at.node] is None:
            at = at.previous or START
        if at.node == ROOT:
            return START, 0
        if self.prompt_begins(packed, at.node):
            return at, self._ends[at.node] or 0
        same = common_prefix(self.pack(at.node), packed) // WIDTH
        while at.node != ROOT and (self._ends[at.node] or 0) > same:
            at = at.previous or START
        return (START, 0) if at.node == ROOT else (at, self._ends[at.node] or 0)

    def longest_prefix(self, packed: bytes, beyond: int) -> int | None:
        """The answer at the end of the longest call, past `beyond` tokens, that a prompt begins with."""
        low = bisect_right(self._answers, (beyond, len(self.nodes)))
        high = bisect_right(self._answers, (len(packed) // WIDTH, len(self.nodes)))
        for end, leaf in reversed(self._answers[low:high]):
            last = self.nodes[leaf].ids
            if last and packed[(end - len(last)) * WIDTH : end * WIDTH] != last.tobytes():
                continue
            if self.prompt_begins(packed, leaf):
                return leaf
        return None
