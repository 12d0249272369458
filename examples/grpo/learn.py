"""The learner: warm-up on demonstrations, then clipped policy gradient on rows with exactly the sampled ids and logprobs.

Most tokens of an attempt are grammar that every attempt says alike, yet they carry the attempt's advantage. With a few groups
a step that is noise, and it adds up: a model that may wander forgets the grammar, all its attempts score the same, and groups
that score the same teach nothing any more. So each step also holds the model near the one that was warmed up.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from examples.grpo.world import demonstration
from rollyard.train.tiny import TinyModel
from rollyard.train.tree import group_by_tree, pack_tree, row_logprobs
from rollyard.trajectory.samples import Sample
from rollyard.trajectory.value_tree import node_advantages

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ANCHOR = 0.1  # weight of the drift from the reference in the loss
WARM = 400  # supervised steps before


def padded(rows: Sequence[Sequence[int]], fill: float = 0, dtype: torch.dtype = torch.long) -> torch.Tensor:
    out = torch.full((len(rows), max(map(len, rows))), fill, dtype=dtype)
    for number, row in enumerate(rows):
        out[number, : len(row)] = torch.tensor(list(row), dtype=dtype)
    return out


def token_logprobs(model: TinyModel, ids: torch.Tensor) -> torch.Tensor:
    """Logprob of each token given those before it; the first has none and gets 0."""
    logits, _ = model(ids[:, :-1])
    picked = F.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
    return F.pad(picked, (1, 0))


def tree_logprobs(model: TinyModel, rows: Sequence[Sample]) -> torch.Tensor:
    """The same for rows of rollouts, where prefixes that rows of a rollout or of its branches share are computed once."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for own in group_by_tree(rows):
        tree = pack_tree(own)
        picked = row_logprobs(model.forward_tree(tree.ids, tree.places, tree.sees), tree)
        found |= {(row.rollout_id, row.index): line for row, line in zip(own, picked, strict=True)}
    width = max(len(row.ids) for row in rows)
    lines = [found[row.rollout_id, row.index] for row in rows]
    return torch.stack([F.pad(line, (1, width - 1 - len(line))) for line in lines])


def warm_up(model: TinyModel, *, steps: int, seed: int, skill: float = 0.4) -> float:
    """Supervised steps on a demonstrator that is mostly wrong: the model learns to speak, not to answer."""
    draw = random.Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        rows = [demonstration(draw, skill) for _ in range(32)]
        ids = padded([ids for ids, _ in rows])
        mask = padded([list(mask) for _, mask in rows], dtype=torch.float)
        loss = -(token_logprobs(model, ids) * mask).sum() / mask.sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return float(loss.detach())


def drift(own: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An unbiased estimate, never negative, of the divergence from the reference at each token that was sampled."""
    apart = reference - own
    return apart.exp() - apart - 1


def token_advantages(rows: Sequence[Sample], width: int) -> torch.Tensor:
    """Of every token the advantage of the part of its row that it is in."""
    by_row = node_advantages(rows)
    out = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        for start, advantage in by_row.get((row.rollout_id, row.index), ()):
            out[number, start:] = advantage
    return out


class Learner:
    """The model as it is given is the reference. The optimiser has no weight decay: nothing but the loss moves a weight.
    `tree` computes what rows of a rollout, or of rollouts that branch off each other, share once; the loss is the same, from
    fewer tokens."""

    def __init__(self, model: TinyModel, *, rate: float = 3e-4, tree: bool = False) -> None:
        self.model = model
        self.tree = tree
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.optimiser = torch.optim.Adam(model.parameters(), lr=rate)

    def gap(self, rows: Sequence[Sample]) -> float:
        """The largest difference between the sampler's logprobs and ours, over the tokens that train."""
        ids, mask, behaviour = self._tensors(rows)
        with torch.no_grad():
            return float(((token_logprobs(self.model, ids) - behaviour).abs() * mask).max())

    def loss(self, rows: Sequence[Sample]) -> torch.Tensor:
        """The baseline is per rollout, never per row; a group without variance teaches nothing. Where rollouts branch off each
        other, what lies between two branch points is worth the difference of their values."""
        ids, mask, behaviour = self._tensors(rows)
        weight = token_advantages(rows, ids.shape[1])
        own, reference = (
            tree_logprobs(model, rows) if self.tree else token_logprobs(model, ids)
            for model in (self.model, self.reference)
        )
        ratio = (own - behaviour).exp()
        bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * weight, bounded * weight)
        away = drift(own, reference)
        return ((ANCHOR * away - gain) * mask).sum() / mask.sum().clamp(min=1)

    def step(self, rows: Sequence[Sample]) -> float:
        """One update."""
        loss = self.loss(rows)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return float(loss.detach())

    @staticmethod
    def _tensors(rows: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            padded([row.ids for row in rows]),
            padded([list(row.mask) for row in rows], dtype=torch.float),
            padded([row.logprobs for row in rows], dtype=torch.float),
        )
