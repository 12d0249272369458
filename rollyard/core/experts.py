"""`RoutedExperts`: which experts of a mixture-of-experts model each token went through, as the engine that sampled says it.

A trainer that replays them ("routing replay", R3) computes with the same experts. One row per token: `layers` x `top_k` expert
ids, packed. The last token of a sequence has no row, since nothing was computed from it. The engine's format is kept at the
edges: vLLM gives a base64 `.npy` array of the shape (tokens - 1, layers, top_k), prompt and answer together, and exports write
the same.
"""

from __future__ import annotations

import ast
import base64
import binascii
import struct
from collections.abc import Iterable

import msgspec

_MAGIC = b"\x93NUMPY"
_WIDTHS = {"|u1": 1, "<u2": 2, "<i4": 4}  # how vLLM writes expert ids
_DTYPES = {width: dtype for dtype, width in _WIDTHS.items()}


class RoutedExperts(msgspec.Struct, frozen=True):
    layers: int
    top_k: int
    width: int  # bytes of one id: 1 and 2 unsigned, 4 signed
    data: bytes

    @property
    def _row(self) -> int:
        return self.layers * self.top_k * self.width

    def __len__(self) -> int:
        return len(self.data) // self._row

    def rows(self, start: int, end: int | None = None) -> RoutedExperts:
        last = None if end is None else end * self._row
        return msgspec.structs.replace(self, data=self.data[start * self._row : last])

    def to_npy(self) -> bytes:
        shape = (len(self), self.layers, self.top_k)
        header = f"{{'descr': '{_DTYPES[self.width]}', 'fortran_order': False, 'shape': {shape}, }}"
        # Magic, version, length and this fill whole lines
        header = header.ljust(-(-(len(header) + 11) // 64) * 64 - 11) + "\n"
        return _MAGIC + b"\1\0" + struct.pack("<H", len(header)) + header.encode() + self.data

    def to_base64(self) -> str:
        return base64.b64encode(self.to_npy()).decode()


def read_experts(text: object) -> RoutedExperts | None:
    """From the engine's text; None where it gives none. `ValueError` says what cannot be read."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError("the engine's routed experts are no text")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the engine's routed experts are no base64: {error}") from error
    if not data.startswith(_MAGIC) or len(data) < 10:
        raise ValueError("the engine's routed experts are no .npy array")
    size, begin = (struct.unpack("<H", data[8:10])[0], 10) if data[6] == 1 else (struct.unpack("<I", data[8:12])[0], 12)
    try:
        header = ast.literal_eval(data[begin : begin + size].decode())
        dtype, (tokens, layers, top_k) = header["descr"], header["shape"]
        width, body = _WIDTHS[dtype], data[begin + size :]
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise ValueError(f"the engine's routed experts have another shape: {type(error).__name__}: {error}") from error
    if header.get("fortran_order") or len(body) != tokens * layers * top_k * width or not layers * top_k:
        raise ValueError(f"the engine's routed experts have {len(body)} bytes for the shape {header['shape']}")
    return RoutedExperts(layers, top_k, width, body)


def join_experts(parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
    """One after the other; None where one is missing or of another shape."""
    found = list(parts)
    first = found[0] if found else None
    if first is None or any(
        p is None or (p.layers, p.top_k, p.width) != (first.layers, first.top_k, first.width) for p in found
    ):
        return None
    return msgspec.structs.replace(first, data=b"".join(part.data for part in found if part is not None))
