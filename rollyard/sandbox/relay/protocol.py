"""Frames of the relay: 1 byte kind, 4 bytes stream, 4 bytes length, payload. The same on both ends and in both programs.

As `binary` they follow each other; as `lines` each frame is one base64 line, for pipes that are not bytes-exact. A reader takes
pieces of any size and gives whole frames.

| kind | from | means |
|---|---|---|
| H hello | inside | the program is up; payload is the protocol's version |
| L listen | host | accept on 127.0.0.1:port (payload, decimal; 0 = any) |
| B bound | inside | the listener of this stream id has this port |
| D dial | host | connect to 127.0.0.1:port |
| O open | inside | a dialled connection is up; or, with a listener's id as payload, a new one was accepted under this id |
| P payload | both | bytes; at most the credit the other side has given |
| W window | both | this many more bytes may be sent |
| E end | both | no more bytes from this side (half-close) |
| X closed | both | the connection is gone; payload says why |
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator

VERSION = b"1"
HELLO, LISTEN, BOUND, DIAL, OPEN, PAYLOAD, WINDOW, END, CLOSED = b"H", b"L", b"B", b"D", b"O", b"P", b"W", b"E", b"X"
KINDS = frozenset({HELLO, LISTEN, BOUND, DIAL, OPEN, PAYLOAD, WINDOW, END, CLOSED})
CREDIT = 512 * 1024
CHUNK = 64 * 1024
_HEAD = struct.Struct(">cII")

Frame = tuple[bytes, int, bytes]


class Garbled(ValueError):
    """Bytes that are no frame: the program printed something else, or the pipe lost data."""


def pack(kind: bytes, stream: int, payload: bytes = b"", *, lines: bool = False) -> bytes:
    frame = _HEAD.pack(kind, stream, len(payload)) + payload
    return base64.b64encode(frame) + b"\n" if lines else frame


class FrameReader:
    def __init__(self, *, lines: bool = False) -> None:
        self._lines = lines
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        return self._from_lines() if self._lines else self._from_bytes()

    def _from_bytes(self) -> Iterator[Frame]:
        at = 0
        try:
            while len(self._buffer) - at >= _HEAD.size:
                kind, stream, size = _HEAD.unpack_from(self._buffer, at)
                if kind not in KINDS or size > 4 * CHUNK:
                    raise Garbled(f"not a frame: {bytes(self._buffer[at : at + 40])!r}")
                if len(self._buffer) - at - _HEAD.size < size:
                    return
                start = at + _HEAD.size
                at = start + size
                yield kind, stream, bytes(self._buffer[start:at])
        finally:
            del self._buffer[:at]

    def _from_lines(self) -> Iterator[Frame]:
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).strip()
            del self._buffer[: end + 1]
            if not line:
                continue
            try:
                frame = base64.b64decode(line, validate=True)
                kind, stream, size = _HEAD.unpack_from(frame)
            except (binascii.Error, struct.error) as error:
                raise Garbled(f"not a frame: {line[:80]!r}") from error
            if kind not in KINDS or len(frame) != _HEAD.size + size:
                raise Garbled(f"not a frame: {line[:80]!r}")
            yield kind, stream, frame[_HEAD.size :]
