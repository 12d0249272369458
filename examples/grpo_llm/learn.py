"""The learner: a warm-up on demonstrations, then clipped policy gradient on rows with exactly the sampled ids and logprobs.

There is no reference model. A step's size is held by what it does: after each update the divergence from the policy that
sampled is measured on the same rows, and the rate falls where it was too large and rises where it was too small.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from examples.grpo_llm.chores import Writer, demonstration
from examples.grpo_llm.llama import Llama
from rollyard.trajectory.samples import Sample, advantages

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SKILL = 0.35  # how often the demonstrator is right at each command
BATCH, TOKENS = 32, 6144  # rows, and tokens with their padding, that are computed together
WARM_RATE, RATE = 2e-4, 2e-5
RATES = (1e-6, 2e-4)
DIVERGENCE = 0.004  # of one step, in nats per token
UPDATES = 2  # of one step, each on half of its rollouts


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """`gap` is between the sampler's logprobs and the trainer's before any update; `rows` are those that had an advantage."""

    gap_max: float
    gap_mean: float
    rows: int
    divergence: float
    rate: float


def padded(rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.float) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)


def trained_logprobs(model: Llama, ids: Tensor, mask: Tensor) -> Tensor:
    """Logprob of each masked token given those before it, one after the other as `tensor[mask]` has them. Only their own
    places are multiplied with the vocabulary."""
    hidden = model(ids[:, :-1])[mask[:, 1:]]
    return model.logits(hidden).log_softmax(-1).gather(1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0]


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Fewer bits in products, several times faster on a GPU: for the warm-up, whose logprobs are not compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def warm_up(model: Llama, renderer: Writer, *, steps: int, seed: int, skill: float = SKILL) -> list[float]:
    """Supervised steps on a demonstrator who is mostly wrong: the model learns to call the tool, not what is right. Gives
    the loss of every step."""
    draw = random.Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    losses: list[float] = []
    with tensor_cores():
        for step in range(steps):
            shown = [demonstration(draw, renderer, skill) for _ in range(BATCH)]
            ids = padded([ids for ids, _ in shown], model.device, torch.long)
            mask = padded([mask for _, mask in shown], model.device, torch.bool)
            loss = -trained_logprobs(model, ids, mask).mean()
            for group in optimiser.param_groups:
                group["lr"] = WARM_RATE * min(1.0, (step + 1) / 10, (steps - step) / (steps / 2))
            update(model, optimiser, [loss])
            losses.append(round(float(loss.detach()), 4))
    return losses


def update(model: Llama, optimiser: torch.optim.Optimizer, losses: Iterator[Tensor] | Sequence[Tensor]) -> None:
    """One update from the sum of the losses, of which one at a time is held in memory."""
    optimiser.zero_grad()
    for loss in losses:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


class Learner:
    def __init__(self, model: Llama, *, rate: float = RATE, seed: int = 0) -> None:
        self.model = model
        self.rate = rate
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._draw = random.Random(seed)

    def step(self, rows: Sequence[Sample]) -> StepReport:
        """The baseline is per rollout, never per row; a group without variance teaches nothing and is not computed."""
        by_rollout = advantages(rows)
        apart = torch.cat([self._apart(batch) for batch in batches(rows)]).abs()
        useful = [row for row in rows if by_rollout.get(row.rollout_id)]
        self._draw.shuffle(useful)
        used = self.rate
        for part in range(UPDATES):
            chosen = useful[part::UPDATES]
            if chosen:
                tokens = sum(row.trained for row in chosen)
                losses = (self._loss(batch, by_rollout).sum() / tokens for batch in batches(chosen))
                update(self.model, self.optimiser, losses)
        divergence = self._adapt(rows) if useful else 0.0
        return StepReport(
            gap_max=float(apart.max()),
            gap_mean=float(apart.mean()),
            rows=len(useful),
            divergence=divergence,
            rate=used,
        )

    def _loss(self, rows: Sequence[Sample], by_rollout: dict[str, float]) -> Tensor:
        ids, mask, behaviour = self._tensors(rows)
        weight = torch.tensor([by_rollout[row.rollout_id] for row in rows], device=self.model.device)
        weight = weight[:, None].expand(mask.shape)[mask]
        ratio = (trained_logprobs(self.model, ids, mask) - behaviour[mask]).exp()
        return -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * weight)

    @torch.no_grad()
    def _apart(self, rows: Sequence[Sample]) -> Tensor:
        """The trainer's logprobs less the sampler's, of every token that trains."""
        ids, mask, behaviour = self._tensors(rows)
        return trained_logprobs(self.model, ids, mask) - behaviour[mask]

    def _adapt(self, rows: Sequence[Sample]) -> float:
        """An unbiased estimate, never negative, of the divergence from the policy that sampled; and the next rate."""
        apart = torch.cat([self._apart(batch) for batch in batches(rows)])
        divergence = float((apart.exp() - apart - 1).mean())
        if divergence > 2 * DIVERGENCE:
            self.rate = max(RATES[0], self.rate / 1.5)
        elif divergence < DIVERGENCE / 2:
            self.rate = min(RATES[1], self.rate * 1.5)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
        return divergence

    def _tensors(self, rows: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        device = self.model.device
        return (
            padded([row.ids for row in rows], device, torch.long),
            padded([row.mask for row in rows], device, torch.bool),
            padded([row.logprobs for row in rows], device),
        )


def batches(rows: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Rows of about the same length together."""
    batch: list[Sample] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if len(batch) == BATCH or (batch and (len(batch) + 1) * len(row.ids) > TOKENS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
