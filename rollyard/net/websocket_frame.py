"""One whole WebSocket frame as bytes, in and out: nearly all that an environment's steps consist of.

`read_message` knows one shape: a data frame that is its whole message, alone in what was read, with a length of at most two
bytes. It answers None to everything else (parts of frames, several frames, fragments, control frames, reserved bits, wrong
masking), so that the `websockets` package's protocol alone decides about those. Going through that protocol for every small
frame makes a step half as expensive again.
"""

from __future__ import annotations

import os
from struct import pack

from websockets.frames import Frame

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform for which the package has no wheel
    from websockets.utils import apply_mask

SMALL = 2**16  # bytes that a length of two bytes cannot tell
_TEXT = 0x81
_BINARY = 0x82
_MASKED = 0x80
_TWO_BYTES = 126
_POOL = 1024


class Masks:
    """Four unpredictable bytes for each frame of a client, taken from the system's random numbers many at a time."""

    def __init__(self) -> None:
        self._pool = b""
        self._at = 0

    def draw(self) -> bytes:
        at = self._at
        if at >= len(self._pool):
            self._pool, at = os.urandom(_POOL), 0
        self._at = at + 4
        return self._pool[at : at + 4]


def read_message(data: bytes, *, masked: bool) -> bytes | None:
    """The payload, where `data` is exactly one frame that is a whole message."""
    size = len(data)
    if size < 2 or (data[0] != _TEXT and data[0] != _BINARY):
        return None
    length, at = data[1], 2
    if masked:
        length -= _MASKED
    if length == _TWO_BYTES and size >= 4:
        length, at = data[2] << 8 | data[3], 4
    elif not 0 <= length < _TWO_BYTES:
        return None
    if not masked:
        return data[at:] if size == at + length else None
    return apply_mask(data[at + 4 :], data[at : at + 4]) if size == at + 4 + length else None


def write_text(text: bytes, mask: bytes | None) -> bytes:
    """A text frame of fewer than `SMALL` bytes; a client's has a mask."""
    length, flag = len(text), 0 if mask is None else _MASKED
    head = bytes((_TEXT, flag | length)) if length < _TWO_BYTES else pack("!BBH", _TEXT, flag | _TWO_BYTES, length)
    return head + text if mask is None else head + mask + apply_mask(text, mask)


def least_size(frame: Frame, *, masked: bool) -> int:
    """The bytes that a frame takes at least: a sender may write a length in more of them than it needs."""
    length = len(frame.data)
    head = 2 if length < _TWO_BYTES else 4 if length < SMALL else 10
    return head + length + (4 if masked else 0)
