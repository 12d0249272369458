"""The rows of a rollout as one tree, so that a prefix which several rows share is computed once.

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


def pack_tree(rows: Sequence[Sample]) -> PackedTree:
    """All rows of one rollout, in the order of their indexes."""
    paths: list[list[int]] = []
    ids: list[int] = []
    places: list[int] = []
    for row in rows:
        path = [] if row.parent is None else paths[row.parent][: row.shared]
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


def row_logprobs(logits: Tensor, tree: PackedTree) -> list[Tensor]:
    """For each row the logprob of every token but the first, from the logits of the tree's tokens."""
    scores = logits.log_softmax(-1)
    return [scores[path[:-1], tree.ids[path[1:]]] for path in tree.paths]
