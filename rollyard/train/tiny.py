"""A small decoder-only transformer in plain torch: the model of the reference server and of the training example.

Rotary positions, pre-norm, gated feed-forward, a key-value cache. Rows of a batch may begin at different places (left
padding): a padded row gives the same logits as the row alone, so that what the sampler said is what the trainer computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollyard.core.errors import ConfigError

CONFIG, WEIGHTS = "config.json", "weights.pt"
Cache = list[tuple[Tensor, Tensor]]


class TinyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = "rollyard-tiny"
    vocabulary: int = 262
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 1024


class TransformerBlock(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 8 * width // 3 * 2, bias=False)
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = rotate(q, turn).transpose(1, 2), rotate(k, turn).transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        gate, value = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value), (k, v)


class TinyModel(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward_tree(self, ids: Tensor, places: Tensor, sees: Tensor) -> Tensor:
        """Logits of every token of a tree of rows (see `tree.pack_tree`): each has the place that it has in its row, and
        sees the tokens before it there. `sees` is a square of booleans."""
        turn = angles(places[None], self.config.width // self.config.heads)
        x = self.embed(ids[None])
        for block in self.blocks:
            x, _ = block(x, turn, sees[None, None], None)
        return self.head(self.norm(x))[0]

    def forward(
        self, ids: Tensor, real: Tensor | None = None, cache: Cache | None = None, last: bool = False
    ) -> tuple[Tensor, Cache]:
        """Logits of every position (or the last one), and the cache. `real` marks the tokens that are not padding, over
        the cached ones too; without it all are."""
        rows, length = ids.shape
        past = 0 if not cache else cache[0][0].shape[2]
        if real is None:
            real = torch.ones(rows, past + length, dtype=torch.bool, device=ids.device)
        places = (real.cumsum(1) - 1).clamp(min=0)[:, past:]
        turn = angles(places, self.config.width // self.config.heads)
        steps = torch.arange(past + length, device=ids.device)
        causal = steps[None, :] <= steps[past:, None]
        own = steps[None, :] == steps[past:, None]  # padding attends to itself, so that no row of scores is empty
        mask = (causal[None] & real[:, None, :] | own[None])[:, None]
        x = self.embed(ids)
        kept: Cache = []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, turn, mask, cache[number] if cache else None)
            kept.append(pair)
        return self.head(self.norm(x[:, -1:] if last else x)), kept


def angles(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=places.device) / size)
    turned = places[..., None].float() * rates
    return turned.cos()[:, :, None], turned.sin()[:, :, None]


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def save_model(model: TinyModel, folder: str | Path) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(msgspec.json.encode(model.config))
    part = folder / f"{WEIGHTS}.part"
    torch.save(model.state_dict(), part)
    part.replace(folder / WEIGHTS)
    return folder


def load_model(source: str | Path, device: str = "cpu") -> TinyModel:
    """From a folder that `save_model` wrote, or `tiny` for an untrained one."""
    if str(source) == "tiny":
        return TinyModel(TinyConfig()).to(device).eval()
    folder = Path(source)
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=TinyConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{source} holds no model of this server: {error}") from error
    if config.kind != "rollyard-tiny":
        raise ConfigError(f"{source} is a {config.kind!r}; this server runs rollyard-tiny models")
    model = TinyModel(config)
    model.load_state_dict(load_weights(folder, device))
    return model.to(device).eval()


def load_weights(folder: str | Path, device: str = "cpu") -> dict[str, Any]:
    """Tensors only: nothing in the file is run."""
    try:
        return torch.load(Path(folder) / WEIGHTS, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise ConfigError(f"cannot read weights in {folder}: {type(error).__name__}") from error
