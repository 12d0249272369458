"""A body as a difference from an earlier one: how a conversation that is resent whole each turn is stored once.

`difference` takes the common head and tail out of the base, and cuts what lies between at the JSON keys under which
providers put the parts that grow or repeat, to try again there. It compares memory, never bytes in a Python loop, and it
knows nothing of JSON: a key inside a string only makes the difference larger, never wrong, since `apply` is exact for any
input.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ANCHORS = (b'"prompt_token_ids":', b'"messages":', b'"input":', b'"contents":', b'"tools":')
LEAST_COPY = 32  # a shorter copy costs more to describe than to repeat
LEAST_CUT = 4096  # a shorter middle is kept as it is
_LAST = 256  # bytes in which a bisection would cost more than arithmetic


class Delta(msgspec.Struct, frozen=True, gc=False):
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
    """How many leading bytes are equal: a bisection down to `_LAST` bytes, which are compared as numbers. Each step compares
    memory; nothing long is copied."""
    low, high = 0, min(len(a), len(b))  # equal up to low, and not beyond high
    view = memoryview(b)
    while high - low > _LAST:
        middle = (low + high) // 2
        if a.startswith(view[low:middle], low):
            low = middle
        else:
            high = middle
    return low + _equal_bytes(a[low:high], b[low:high], "little")


def common_suffix(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b))
    view, a_end, b_end = memoryview(b), len(a), len(b)
    while high - low > _LAST:
        middle = (low + high) // 2
        if a.startswith(view[b_end - middle : b_end - low], a_end - middle):
            low = middle
        else:
            high = middle
    return low + _equal_bytes(a[a_end - high : a_end - low], b[b_end - high : b_end - low], "big")


def _equal_bytes(a: bytes, b: bytes, first: Literal["little", "big"]) -> int:
    """How many bytes of two equally long strings are equal, from the one that is lowest in a number of that order."""
    differs = int.from_bytes(a, first) ^ int.from_bytes(b, first)
    return len(a) if not differs else ((differs & -differs).bit_length() - 1) // 8


def difference(base_digest: bytes, base: bytes, body: bytes) -> Delta | None:
    """`body` in terms of `base`, or None where that would not at least halve it."""
    pieces: list[bytes | tuple[int, int]] = []
    _compare(pieces, base, 0, body, ANCHORS)
    delta = Delta(base_digest, tuple(pieces))
    return delta if delta.size * 2 <= len(body) else None


def apply(delta: Delta, base: bytes) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else base[piece[0] : piece[1]] for piece in delta.pieces)


def _compare(
    pieces: list[bytes | tuple[int, int]], old: bytes, offset: int, new: bytes, anchors: tuple[bytes, ...]
) -> None:
    """Describe `new` by `old`, which begins at `offset` of the base."""
    head = common_prefix(old, new)
    head = head if head >= LEAST_COPY else 0
    old_end, new_end = len(old), len(new)
    tail = common_suffix(old[head:], new[head:])
    tail = tail if tail >= LEAST_COPY else 0
    if head:
        pieces.append((offset, offset + head))
    _compare_between(pieces, old[head : old_end - tail], offset + head, new[head : new_end - tail], anchors)
    if tail:
        pieces.append((offset + old_end - tail, offset + old_end))


def _compare_between(
    pieces: list[bytes | tuple[int, int]], old: bytes, offset: int, new: bytes, anchors: tuple[bytes, ...]
) -> None:
    if len(old) >= LEAST_CUT and len(new) >= LEAST_CUT:
        for index, word in enumerate(anchors):
            old_at, new_at = old.find(word), new.find(word)
            if old_at > 0 and new_at > 0:
                _compare_between(pieces, old[:old_at], offset, new[:new_at], anchors[index + 1 :])
                _compare(pieces, old[old_at:], offset + old_at, new[new_at:], anchors[index + 1 :])
                return
    if new:
        pieces.append(new)
