"""The bodies of the calls that are likely to be continued next, a few at a time: the base of the next difference.

Everything here can be lost without harm: a body without a base is kept whole.
"""

from __future__ import annotations

import hashlib

import msgspec

from rollyard.core.delta import Blob, difference

KEPT = 4
SMALLEST = 8192  # bodies below this are not worth a difference
LONGEST_CHAIN = 24  # differences of differences; bounds what reading one body costs


class CachedBody(msgspec.Struct, frozen=True, gc=False):
    digest: bytes
    raw: bytes
    chain: int = 0  # how many differences lead to a whole body


class Tip(msgspec.Struct, frozen=True, gc=False):
    """The bodies of one call."""

    request: CachedBody | None = None
    response: CachedBody | None = None


class Tips:
    """By leaf node; a call that continues another takes its place."""

    def __init__(self) -> None:
        self._tips: dict[int, Tip] = {}

    def get(self, leaf: int) -> Tip | None:
        return self._tips.get(leaf)

    def latest(self) -> Tip | None:
        return next(reversed(self._tips.values()), None)

    def put(self, leaf: int, tip: Tip, *, instead_of: int | None) -> None:
        if instead_of is not None:
            self._tips.pop(instead_of, None)
        while len(self._tips) >= KEPT:
            del self._tips[next(iter(self._tips))]
        self._tips[leaf] = tip


def keep(raw: bytes, digest: bytes, base: CachedBody | None, blobs: dict[bytes, Blob]) -> CachedBody | None:
    """Put a body into `blobs`, as a difference where that pays, and give what the next one may build on."""
    if not raw:
        return None
    digest = digest or hashlib.sha256(raw).digest()
    if base is not None and base.digest == digest:
        return base
    if base is not None and len(raw) >= SMALLEST and base.chain < LONGEST_CHAIN:
        delta = difference(base.digest, base.raw, raw)
        if delta is not None:
            blobs[digest] = delta
            return CachedBody(digest, raw, base.chain + 1)
    blobs[digest] = raw
    return CachedBody(digest, raw)
