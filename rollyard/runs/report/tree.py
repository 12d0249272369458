"""The tree that rollouts and their branches make, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollyard.core.printable import printable
from rollyard.trajectory.value_tree import TreeLeaf, TreeNode, tree_nodes


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
