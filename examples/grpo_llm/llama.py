"""A Llama in plain torch, one model for sampling and training: what the sampler said is what the trainer computes.

`forward` takes whole rows, padded on the right, and can hand back keys and values. `decode` takes one token for each row of
a `Slots` cache whose tensors never move, so that a GPU can replay it as one recorded graph.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def size(self) -> int:
        """Of one head."""
        return self.width // self.heads


class Slots:
    """Keys and values of `count` rows of at most `length` tokens."""

    def __init__(self, config: LlamaConfig, count: int, length: int, device: torch.device) -> None:
        shape = (config.layers, count, config.key_heads, length, config.size)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.count, self.length = count, length
        self.rows = torch.arange(count, device=device)
        self.steps = torch.arange(length, device=device)


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, keys = config.width, config.key_heads * config.size
        self.config = config
        self.before = nn.RMSNorm(width, eps=config.eps)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.between = nn.RMSNorm(width, eps=config.eps)
        self.gate = nn.Linear(width, config.inner, bias=False)
        self.up = nn.Linear(width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, width, bias=False)

    def project(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (row, head, token, size)."""
        x = self.before(x)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.config.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return rotate(q, turn), rotate(k, turn), v

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        inner = self.between(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x, turn)
        share = self.config.heads // self.config.key_heads
        wide = (part.repeat_interleave(share, 1) for part in (k, v))
        return self.finish(x, F.scaled_dot_product_attention(q, *wide, is_causal=True)), k, v

    def decode(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], at: Tensor, slots: Slots
    ) -> Tensor:
        q, k, v = self.project(x, turn)
        keys, values = cache
        keys[slots.rows, :, at], values[slots.rows, :, at] = k[:, :, 0], v[:, :, 0]
        grouped = q[:, :, 0].unflatten(1, (self.config.key_heads, -1))
        scores = grouped @ keys.transpose(-1, -2) * self.config.size**-0.5
        later = (slots.steps[None] > at[:, None])[:, None, None]
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        return self.finish(x, seen.flatten(1, 2)[:, :, None])


class Llama(nn.Module):
    """The output matrix is the embedding, as in all small Llamas."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        nn.init.normal_(self.embed.weight, std=0.02)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(self, ids: Tensor, slots: Slots | None = None, into: Tensor | None = None) -> Tensor:
        """The last hidden state of every token. Rows begin at 0 and are padded on the right, which a causal model never
        sees. With `slots`, the keys and values of row n are left in slot `into[n]`."""
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        turn = angles(places, self.config)
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x, k, v = block(x, turn)
            if slots is not None and into is not None:
                slots.keys[number, into, :, : ids.shape[1]] = k
                slots.values[number, into, :, : ids.shape[1]] = v
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight)

    def decode(self, tokens: Tensor, places: Tensor, slots: Slots) -> Tensor:
        """Logits after one more token in each slot, which stands at the slot's place."""
        turn = angles(places[:, None], self.config)
        x = self.embed(tokens[:, None])
        for number, block in enumerate(self.blocks):
            assert isinstance(block, LlamaBlock)
            x = block.decode(x, turn, (slots.keys[number], slots.values[number]), places, slots)
        return self.logits(self.norm(x[:, 0]))


def angles(places: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    rates = config.theta ** (-torch.arange(0, config.size, 2, device=places.device) / config.size)
    turned = places[..., None].float() * rates
    return turned.cos()[:, None], turned.sin()[:, None]


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
