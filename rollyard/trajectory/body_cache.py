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


class CallBodies(msgspec.Struct, frozen=True, gc=False):
    """The bodies of one call."""

    request: CachedBody | None = None
    response: CachedBody | None = None


class BodyCache:
    """By leaf node; a call that continues another takes its place."""

    def __init__(self) -> None:
        self._bodies: dict[int, CallBodies] = {}

    def get(self, leaf: int) -> CallBodies | None:
        return self._bodies.get(leaf)

    def latest(self) -> CallBodies | None:
        return next(reversed(self._bodies.values()), None)

    def put(self, leaf: int, bodies: CallBodies, *, instead_of: int | None) -> None:
        if instead_of is not None:
            self._bodies.pop(instead_of, None)
        while len(self._bodies) >= KEPT:
            del self._bodies[next(iter(self._bodies))]
        self._bodies[leaf] = bodies


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
