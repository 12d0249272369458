"""The rows of a rollout, or of rollouts that branch off each other, as one tree: a prefix that several rows share is computed
once.

A token of the tree stands for one place in every row that shares it. Attention goes along the rows: a token sees the tokens
before it in its own row and no others, and has the place that it has there. So each token's logits are those of the flat row,
and a loss over them has the same value and the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from rollyard.trajectory.samples import Sample


class PackedTree(msgspec.Struct, frozen=True, kw_only=True):
    """`ids` and `places` have one entry per token of the tree; `sees[a, b]` says that token `a` sees token `b`. `paths[n]` are
    the tokens of row `n`, in order, as indexes into `ids`."""

    ids: Tensor
    places: Tensor
    sees: Tensor
    paths: tuple[Tensor, ...]


def group_by_tree(rows: Sequence[Sample]) -> list[list[Sample]]:
    """Rows that may share a beginning: those of a rollout, and of all that branch off the same one, however far."""
    above = {row.rollout_id: row.parent_rollout for row in rows}

    def root_of(rollout: str) -> str:
        while (parent := above.get(rollout)) is not None:
            rollout = parent
        return rollout

    found: dict[str, list[Sample]] = {}
    for row in rows:
        found.setdefault(root_of(row.rollout_id), []).append(row)
    return list(found.values())


def pack_tree(rows: Sequence[Sample]) -> PackedTree:
    """All rows of some rollouts, each rollout's in the order of their indexes."""
    paths: list[list[int]] = []
    ids: list[int] = []
    places: list[int] = []
    firsts: dict[str, int] = {}
    for number, row in enumerate(rows):
        first = firsts.setdefault(row.rollout_id, number)
        path = _shared_path(rows[:first], paths, row) if row.parent is None else paths[first + row.parent][: row.shared]
        own = row.ids[len(path) :]
        places += range(len(path), len(row.ids))
        path = [*path, *range(len(ids), len(ids) + len(own))]
        ids += own
        paths.append(path)
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for path in paths:
        index = torch.tensor(path)
        sees[index[:, None], index[None, :]] |= torch.ones(len(path), len(path), dtype=torch.bool).tril()
    return PackedTree(
        ids=torch.tensor(ids), places=torch.tensor(places), sees=sees, paths=tuple(torch.tensor(path) for path in paths)
    )


def _shared_path(before: Sequence[Sample], paths: Sequence[list[int]], row: Sample) -> list[int]:
    """What a row has from the rollout that its own branches off: of the parent's row, or of the first sibling's."""
    point = (row.parent_rollout, row.parent_call)
    for other, path in zip(before, paths, strict=False):
        kin = other.rollout_id == row.parent_rollout or (other.parent_rollout, other.parent_call) == point
        if row.own_from and kin and other.ids[: row.own_from] == row.ids[: row.own_from]:
            return path[: row.own_from]
    return []


def row_logprobs(logits: Tensor, tree: PackedTree) -> list[Tensor]:
    """For each row the logprob of every token but the first, from the logits of the tree's tokens."""
    scores = logits.log_softmax(-1)
    return [scores[path[:-1], tree.ids[path[1:]]] for path in tree.paths]
