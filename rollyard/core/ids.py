"""Ids: a short prefix that says what the thing is, then time-ordered base32 with 80 random bits.

They sort by creation time, are safe in paths, labels, URLs and DNS names, and cannot be guessed from a neighbour.
They are names, not secrets: `secret()` makes those.
"""

from __future__ import annotations

import os
import secrets
import struct
import time

LAST = "last"  # said instead of an id: the newest run
SHORT = 8  # characters of a short id
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]  # of ten bits each
_halves = struct.Struct(">HQ").unpack


def new_id(prefix: str) -> str:
    """`new_id("run")` -> `run_01k9...`: 45 bits of milliseconds, then 80 random bits."""
    at, pairs = time.time_ns() // 1_000_000, _PAIRS
    high, low = _halves(os.urandom(10))
    return (
        f"{prefix}_{_ALPHABET[(at >> 40) & 31]}{pairs[(at >> 30) & 1023]}{pairs[(at >> 20) & 1023]}"
        f"{pairs[(at >> 10) & 1023]}{pairs[at & 1023]}"
        f"{pairs[high >> 6]}{pairs[(high & 63) << 4 | low >> 60]}{pairs[(low >> 50) & 1023]}{pairs[(low >> 40) & 1023]}"
        f"{pairs[(low >> 30) & 1023]}{pairs[(low >> 20) & 1023]}{pairs[(low >> 10) & 1023]}{pairs[low & 1023]}"
    )


def short_id(id: str) -> str:
    """The end of an id, by which people name it; that of two things made in the same moment differs."""
    return id[-SHORT:]


def secret(prefix: str = "ry") -> str:
    """An unguessable key of 192 bits."""
    return f"{prefix}-{secrets.token_urlsafe(24)}"
