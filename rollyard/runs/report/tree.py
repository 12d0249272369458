"""The tree that rollouts and their branches make: what each branch point is worth, and how it looks in text.

Every rollout is a leaf, with a verdict of its own. A branch point is worth the mean reward of the leaves whose path goes through
it: the parent, which went on from there, the children, and theirs. Credit for what an answer did is the difference between
the value after it and the value before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from rollyard.core.rollout import Rollout
from rollyard.store.listing import printable


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A branch point: the call of `rollout` that others went on from. `value` is None where none of its leaves has a reward."""

    rollout: str
    call: str
    children: tuple[str, ...]
    leaves: int
    value: float | None


class TreeLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as a tree needs it."""

    id: str
    task_id: str
    agent: str
    status: str
    reward: float | None
    parent: str | None
    call: str | None
    replayed: int


def leaf_of(rollout: Rollout) -> TreeLeaf:
    return TreeLeaf(
        id=rollout.id,
        task_id=rollout.task.id,
        agent=rollout.agent,
        status=rollout.status,
        reward=rollout.reward,
        parent=rollout.parent_rollout,
        call=rollout.parent_call,
        replayed=rollout.replayed,
    )


def tree_nodes(leaves: Sequence[TreeLeaf]) -> tuple[TreeNode, ...]:
    """The branch points of these rollouts, parents before children."""
    known = {leaf.id: leaf for leaf in leaves}
    groups: dict[tuple[str, str], list[TreeLeaf]] = {}
    for leaf in leaves:
        if leaf.parent is not None and leaf.call is not None:
            groups.setdefault((leaf.parent, leaf.call), []).append(leaf)
    nodes: list[TreeNode] = []
    for (parent, call), children in groups.items():
        below = [leaf for child in children for leaf in _descend(child, leaves)]
        below += [known[parent]] if parent in known else []
        rewards = [leaf.reward for leaf in below if leaf.reward is not None]
        nodes.append(
            TreeNode(
                rollout=parent,
                call=call,
                children=tuple(child.id for child in children),
                leaves=len(below),
                value=fmean(rewards) if rewards else None,
            )
        )
    return tuple(nodes)


def _descend(leaf: TreeLeaf, leaves: Sequence[TreeLeaf]) -> Iterable[TreeLeaf]:
    """A rollout and all that branch off it, at any level."""
    yield leaf
    for child in leaves:
        if child.parent == leaf.id:
            yield from _descend(child, leaves)


def draw_tree(leaves: Sequence[TreeLeaf]) -> list[str]:
    """One line for each rollout and branch point, children below their parents."""
    nodes = {(node.rollout, node.call): node for node in tree_nodes(leaves)}
    if not nodes:
        return []
    known = {leaf.id for leaf in leaves}
    lines: list[str] = []
    for leaf in leaves:
        if leaf.parent is None or leaf.parent not in known:
            lines += _draw(leaf, leaves, nodes.values(), "")
    return [printable(line) for line in lines]


def _draw(leaf: TreeLeaf, leaves: Sequence[TreeLeaf], nodes: Iterable[TreeNode], indent: str) -> list[str]:
    name = f"{leaf.task_id} {leaf.agent}  " if not indent else ""
    lines = [f"{indent}{name}{leaf.id}  {leaf.status}  reward {_number(leaf.reward)}"]
    for node in nodes:
        if node.rollout == leaf.id:
            lines.append(f"{indent}  at {node.call}  value {_number(node.value)} of {node.leaves} leaves")
            for child in leaves:
                if child.id in node.children:
                    lines += _draw(child, leaves, nodes, f"{indent}    ")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
