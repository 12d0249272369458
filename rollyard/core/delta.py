"""A body as a difference from an earlier one: how a conversation that is resent whole each turn is stored once.

`difference` cuts both bodies at the JSON keys under which providers put the parts that grow or repeat, and takes the common
head and tail of each piece out of the base. It compares memory, never bytes in a Python loop, and it knows nothing of JSON:
a key inside a string only makes the difference larger, never wrong, since `apply` is exact for any input.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

ANCHORS = (
    b'"messages":',
    b'"input":',
    b'"contents":',
    b'"system":',
    b'"instructions":',
    b'"tools":',
    b'"prompt_token_ids":',
    b'"usage":',
)
LEAST_COPY = 32  # a shorter copy costs more to describe than to repeat


class Delta(msgspec.Struct, frozen=True):
    """`pieces` in order: bytes as they are, or a half-open range of the base body, which is kept under the digest `base`."""

    base: bytes
    pieces: tuple[bytes | tuple[int, int], ...]

    @property
    def whole(self) -> int:
        """The size of the body it stands for."""
        return sum(len(piece) if isinstance(piece, bytes) else piece[1] - piece[0] for piece in self.pieces)

    @property
    def size(self) -> int:
        """About what it takes to keep."""
        return sum(len(piece) if isinstance(piece, bytes) else 8 for piece in self.pieces)


Blob = bytes | Delta


def common_prefix(a: bytes, b: bytes) -> int:
    """How many leading bytes are equal: a bisection over memory comparisons."""
    size = min(len(a), len(b))
    left, right = memoryview(a), memoryview(b)
    if left[:size] == right[:size]:
        return size
    low, high = 0, size  # equal up to low, different before high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_suffix(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    left, right = memoryview(a)[len(a) - size :], memoryview(b)[len(b) - size :]
    if left == right:
        return size
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if left[size - middle : size - low] == right[size - middle : size - low]:
            low = middle
        else:
            high = middle
    return low


def difference(base_digest: bytes, base: bytes, body: bytes) -> Delta | None:
    """`body` in terms of `base`, or None where that would not at least halve it."""
    pieces: list[bytes | tuple[int, int]] = []
    old_cuts, new_cuts = _cuts(base, body)
    for (old_start, old_end), (new_start, new_end) in zip(old_cuts, new_cuts, strict=True):
        _piece(pieces, base[old_start:old_end], old_start, body[new_start:new_end])
    delta = Delta(base_digest, tuple(pieces))
    return delta if delta.size * 2 <= len(body) else None


def apply(delta: Delta, base: bytes) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else base[piece[0] : piece[1]] for piece in delta.pieces)


def _cuts(base: bytes, body: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Both bodies cut at the first occurrence of each anchor, where these stand in the same order; else not cut."""
    found = [(base.find(word), body.find(word)) for word in ANCHORS]
    marks = sorted(pair for pair in found if pair[0] >= 0 and pair[1] >= 0)
    if any(left[1] >= right[1] for left, right in pairwise(marks)):
        marks = []
    old = [0, *(mark[0] for mark in marks), len(base)]
    new = [0, *(mark[1] for mark in marks), len(body)]
    return list(pairwise(old)), list(pairwise(new))


def _piece(pieces: list[bytes | tuple[int, int]], old: bytes, offset: int, new: bytes) -> None:
    head = common_prefix(old, new)
    if head < LEAST_COPY:
        head = 0
    tail = common_suffix(old[head:], new[head:])
    if tail < LEAST_COPY:
        tail = 0
    if head:
        pieces.append((offset, offset + head))
    if len(new) > head + tail:
        pieces.append(new[head : len(new) - tail])
    if tail:
        pieces.append((offset + len(old) - tail, offset + len(old)))
