"""A GGUF file of a Llama as a model of `llama.py`: its quantised tensors become float32.

SmolLM2-135M-Instruct comes from the wheel that `tests.servers.smollm` fetches: matrices of four bits (Q4_1), the embedding of
eight (Q8_0). Training begins from what these say, not from the authors' own bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.grpo_llm.llama import Llama, LlamaConfig
from rollyard.core.errors import Unsupported
from rollyard.policy.renderers.gguf import read_head, read_scalar, read_string

Raw = NDArray[np.uint8]
BLOCK = 32  # weights that share a scale
PARTS = {
    "attn_norm": "before",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "out",
    "ffn_norm": "between",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def halves(raw: Raw) -> NDArray[np.float32]:
    return raw.view(np.float16).astype(np.float32)


def read_q4_1(raw: Raw) -> NDArray[np.float32]:
    """A scale, a least value, then 16 bytes: the low halves are the first 16 weights, the high halves the others."""
    blocks = raw.reshape(-1, 20)
    scale, least, packed = halves(blocks[:, :2].copy()), halves(blocks[:, 2:4].copy()), blocks[:, 4:]
    return np.concatenate((packed & 15, packed >> 4), 1) * scale + least


def read_q8_0(raw: Raw) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].copy().view(np.int8) * halves(blocks[:, :2].copy())


# the kinds of tensor: bytes of a block, weights of a block, and how it is read
KINDS: dict[int, tuple[int, int, Callable[[Raw], NDArray[np.float32]]]] = {
    0: (4, 1, lambda raw: raw.view(np.float32)),
    1: (2, 1, halves),
    3: (20, BLOCK, read_q4_1),
    8: (34, BLOCK, read_q8_0),
}


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The metadata, and every tensor by its name."""
    with path.open("rb") as file:
        metadata, count = read_head(file, path.name)
        listed: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = read_string(file)
            shape = tuple(read_scalar(file, "<Q") for _ in range(read_scalar(file, "<I")))
            listed.append((name, shape[::-1], read_scalar(file, "<I"), read_scalar(file, "<Q")))
        align = metadata.get("general.alignment", 32)
        start = -(-file.tell() // align) * align
    data = np.memmap(path, dtype=np.uint8, mode="r")
    found: dict[str, torch.Tensor] = {}
    for name, shape, kind, offset in listed:
        if kind not in KINDS:
            raise Unsupported(f"{path.name}: {name} is of the kind {kind}; read are {sorted(KINDS)}")
        size, per, read = KINDS[kind]
        begin = start + offset
        raw = np.array(data[begin : begin + math.prod(shape) // per * size])
        found[name] = torch.from_numpy(np.ascontiguousarray(read(raw), dtype=np.float32).reshape(shape))
    return metadata, found


def order_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two numbers that turn together beside each other; `rotate` has them half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def load_llama(path: Path) -> Llama:
    metadata, tensors = read_tensors(path)
    if metadata.get("general.architecture") != "llama" or "output.weight" in tensors:
        raise Unsupported(f"{path.name} is no Llama whose output matrix is its embedding")
    config = LlamaConfig(
        vocabulary=tensors["token_embd.weight"].shape[0],
        width=metadata["llama.embedding_length"],
        layers=metadata["llama.block_count"],
        heads=metadata["llama.attention.head_count"],
        key_heads=metadata["llama.attention.head_count_kv"],
        inner=metadata["llama.feed_forward_length"],
        theta=metadata["llama.rope.freq_base"],
        eps=metadata["llama.attention.layer_norm_rms_epsilon"],
    )
    state = {"embed.weight": tensors["token_embd.weight"], "norm.weight": tensors["output_norm.weight"]}
    for number in range(config.layers):
        for theirs, ours in PARTS.items():
            weight = tensors[f"blk.{number}.{theirs}.weight"]
            heads = {"attn_q": config.heads, "attn_k": config.key_heads}.get(theirs)
            state[f"blocks.{number}.{ours}.weight"] = weight if heads is None else order_heads(weight, heads)
    model = Llama(config)
    model.load_state_dict(state)
    return model
