"""The vocabulary and chat template inside a GGUF file: its metadata is read, its weights are not.

Only byte-level BPE vocabularies (`gpt2`) are understood, with the pre-tokenisers named below; any other is refused rather
than guessed, since a wrong split gives wrong ids without an error.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from rollyard.core.errors import ConfigError, Unsupported

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
CONTROL = (3, 4)  # token types: control, user defined
MAX_ENTRIES = 2**22


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs at the head of the file."""
    with path.open("rb") as file:
        return read_head(file, path.name)[0]


def read_head(file: BinaryIO, name: str) -> tuple[dict[str, Any], int]:
    """The key-value pairs, and how many tensors are described behind them, where the file is left."""
    if file.read(4) != b"GGUF":
        raise ConfigError(f"{name} is not a GGUF file")
    version, tensors, count = struct.unpack("<IQQ", file.read(20))
    if version < 2 or count > MAX_ENTRIES:
        raise Unsupported(f"{name}: GGUF version {version} with {count} entries")
    try:
        return {read_string(file): _value(file, read_scalar(file, "<I")) for _ in range(count)}, tensors
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(f"{name} is damaged: {error}") from error


def read_scalar(file: BinaryIO, shape: str) -> Any:
    return struct.unpack(shape, file.read(struct.calcsize(shape)))[0]


def read_string(file: BinaryIO) -> str:
    return file.read(read_scalar(file, "<Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return read_string(file)
    if kind != _ARRAY:
        return read_scalar(file, _SCALARS[kind])
    inner, count = read_scalar(file, "<I"), read_scalar(file, "<Q")
    if inner == _STRING:
        return [read_string(file) for _ in range(count)]
    shape = f"<{count}{_SCALARS[inner][1:]}"
    return list(struct.unpack(shape, file.read(struct.calcsize(shape))))


def tokenizer_of(metadata: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` with the same ids as llama.cpp gives."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise Unsupported(
            f"a GGUF vocabulary of kind {metadata.get('tokenizer.ggml.model')!r}; only gpt2 is understood"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=merges))
    split = metadata.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in _REGEX)
    if split in ("smollm", "refact", "starcoder", "command-r"):
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif split in _REGEX:
        steps = [pre_tokenizers.Split(Regex(_REGEX[split]), "isolated"), byte_level]
    elif split in ("gpt-2", "gpt2", "default"):
        steps = [byte_level]
    else:
        raise Unsupported(f"the pre-tokeniser {split!r} of this GGUF file is not known")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k in CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
_REGEX = {"qwen2": _QWEN, "llama-bpe": _LLAMA3}
