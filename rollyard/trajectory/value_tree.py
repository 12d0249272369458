"""The tree that rollouts and their branches make, and what each branch point is worth.

Every rollout is a leaf, with a verdict of its own. A branch point is worth the mean reward of the leaves whose path goes through
it: the parent, which went on from there, the children, and theirs. Credit for what an answer did is the difference between
the value after it and the value before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, pstdev

import msgspec

from rollyard.core.rollout import Rollout
from rollyard.trajectory.samples import Sample


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A branch point: the call of `rollout` that others went on from. `value` is None where none of its leaves has a reward."""

    rollout: str
    call: str
    children: tuple[str, ...]
    leaves: int
    value: float | None


class TreeLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as a tree needs it. `place` orders the branch points of one parent: what is further along it is larger."""

    id: str
    task_id: str
    agent: str = ""
    status: str = ""
    reward: float | None
    parent: str | None
    call: str | None
    place: int


class RowNode(msgspec.Struct, frozen=True, kw_only=True):
    """A branch point on the way of a row: the answer that is sampled anew there begins at token `start`."""

    rollout: str
    call: str
    start: int
    leaves: int
    value: float | None


def leaf_of(rollout: Rollout) -> TreeLeaf:
    return TreeLeaf(
        id=rollout.id,
        task_id=rollout.task.id,
        agent=rollout.agent,
        status=rollout.status,
        reward=rollout.reward,
        parent=rollout.parent_rollout,
        call=rollout.parent_call,
        place=rollout.replayed,
    )


def tree_nodes(leaves: Sequence[TreeLeaf]) -> tuple[TreeNode, ...]:
    """The branch points of these rollouts, parents before children."""
    known = {leaf.id: leaf for leaf in leaves}
    groups: dict[tuple[str, str], list[TreeLeaf]] = {}
    for leaf in leaves:
        if leaf.parent is not None and leaf.call is not None:
            groups.setdefault((leaf.parent, leaf.call), []).append(leaf)
    children: dict[str, list[TreeLeaf]] = {}
    for leaf in leaves:
        children.setdefault(leaf.parent or "", []).append(leaf)
    nodes: list[TreeNode] = []
    for (parent, call), own in groups.items():
        place = max(leaf.place for leaf in own)
        later = [leaf for leaf in children[parent] if leaf.call != call and leaf.place > place]
        below = [leaf for child in (*own, *later) for leaf in _descend(child, children)]
        below += [known[parent]] if parent in known else []
        rewards = [leaf.reward for leaf in below if leaf.reward is not None]
        nodes.append(
            TreeNode(
                rollout=parent,
                call=call,
                children=tuple(child.id for child in own),
                leaves=len(below),
                value=fmean(rewards) if rewards else None,
            )
        )
    return tuple(nodes)


def _descend(leaf: TreeLeaf, children: dict[str, list[TreeLeaf]]) -> Iterator[TreeLeaf]:
    """A rollout and all that branch off it, at any level."""
    yield leaf
    for child in children.get(leaf.id, ()):
        yield from _descend(child, children)


class ValueTree:
    """The branch points of some rollouts, by the rows that go through them. Rows come in the order of their rollouts, parents
    first: where an ancestor's branch point lies is known from the ancestor's own rows."""

    def __init__(self, leaves: Sequence[TreeLeaf]) -> None:
        self._leaves = {leaf.id: leaf for leaf in leaves}
        self._nodes = {(node.rollout, node.call): node for node in tree_nodes(leaves)}
        self._starts: dict[tuple[str, str], int] = {}

    def nodes_of(self, row: Sample) -> tuple[RowNode, ...]:
        """From its first token to its last."""
        if not self._nodes:
            return ()
        own = ((row.rollout_id, span.call_id or "", span.start) for span in row.spans if span.sampled)
        found = {(rollout, call): start for rollout, call, start in own if (rollout, call) in self._nodes}
        point = (row.parent_rollout or "", row.parent_call or "")
        start = row.own_from if any(span.sampled and span.start == row.own_from for span in row.spans) else None
        while point in self._nodes and start is not None and start <= row.own_from:
            found[point] = start
            above = self._leaves.get(point[0])
            point = ("", "") if above is None else (above.parent or "", above.call or "")
            start = self._starts.get(point)
        self._starts |= found
        in_order = sorted(found.items(), key=lambda pair: pair[1])
        return tuple(_row_node(self._nodes[point], start) for point, start in in_order)


def _row_node(node: TreeNode, start: int) -> RowNode:
    return RowNode(rollout=node.rollout, call=node.call, start=start, leaves=node.leaves, value=node.value)


def node_advantages(rows: Iterable[Sample], *, scale: bool = True) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """By row (its rollout and index): where each of its parts begins, and the part's advantage. A part lies between two branch
    points and is worth the value after it less the value before it; before the first branch point that is the group's mean, after
    the last one the rollout's reward. `scale` divides by the deviation of the group's rewards where there is one. A flat
    group has one part a row, and the advantages of `samples.advantages`."""
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        if row.reward is not None:
            groups.setdefault(row.group_id or row.task_id, []).append(row)
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for group in groups.values():
        leaves = _leaves_of(group)
        rewards = [leaf.reward for leaf in leaves if leaf.reward is not None]
        mean, spread = fmean(rewards), pstdev(rewards)
        by = spread if scale and spread > 0 else 1.0
        tree = ValueTree(leaves)
        for row in group:
            nodes = [(node.start, node.value) for node in tree.nodes_of(row) if node.value is not None]
            befores = [(0, mean), *nodes]
            afters = [*(value for _, value in nodes), row.reward or 0.0]
            parts = [(start, (after - before) / by) for (start, before), after in zip(befores, afters, strict=True)]
            found[row.rollout_id, row.index] = parts
    return found


def _leaves_of(rows: Iterable[Sample]) -> list[TreeLeaf]:
    """One for each rollout that has a row."""
    found: dict[str, TreeLeaf] = {}
    for row in rows:
        before = found.get(row.rollout_id)
        found[row.rollout_id] = TreeLeaf(
            id=row.rollout_id,
            task_id=row.task_id,
            reward=row.reward,
            parent=row.parent_rollout,
            call=row.parent_call,
            place=max(row.own_from, before.place if before is not None else 0),
        )
    return list(found.values())
