"""Ids: a short prefix that says what the thing is, then time-ordered base32 with 80 random bits.

They sort by creation time, are safe in paths, labels, URLs and DNS names, and cannot be guessed from a neighbour.
They are names, not secrets: `secret()` makes those.
"""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _base32(value: int, digits: int) -> str:
    out: list[str] = []
    for _ in range(digits):
        out.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(out))


def new_id(prefix: str) -> str:
    """`new_id("run")` -> `run_01k9...`: 45 bits of milliseconds, then 80 random bits."""
    return f"{prefix}_{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(80), 16)}"


def secret(prefix: str = "ry") -> str:
    """An unguessable key of 192 bits."""
    return f"{prefix}-{secrets.token_urlsafe(24)}"
