"""Ids: a short prefix that says what the thing is, then time-ordered base32 with 80 random bits.

They sort by creation time, are safe in paths, labels, URLs and DNS names, and cannot be guessed from a neighbour.
They are names, not secrets: `secret()` makes those.
"""

from __future__ import annotations

import os
import secrets
import time

LAST = "last"  # said instead of an id: the newest run
SHORT = 8  # characters of a short id
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]  # of ten bits each


def _eight(value: int) -> str:
    """The low forty bits of a number as eight digits."""
    pairs = _PAIRS
    return pairs[(value >> 30) & 1023] + pairs[(value >> 20) & 1023] + pairs[(value >> 10) & 1023] + pairs[value & 1023]


def new_id(prefix: str) -> str:
    """`new_id("run")` -> `run_01k9...`: 45 bits of milliseconds, then 80 random bits."""
    at, chance = time.time_ns() // 1_000_000, int.from_bytes(os.urandom(10), "big")
    return f"{prefix}_{_ALPHABET[(at >> 40) & 31]}{_eight(at)}{_eight(chance >> 40)}{_eight(chance)}"


def short_id(id: str) -> str:
    """The end of an id, by which people name it; that of two things made in the same moment differs."""
    return id[-SHORT:]


def secret(prefix: str = "ry") -> str:
    """An unguessable key of 192 bits."""
    return f"{prefix}-{secrets.token_urlsafe(24)}"
