"""WebSocket frames (RFC 6455) as bytes, for both ends: no I/O, no extensions, text and binary alike.

A step of an environment is one small frame each way. The common case, one whole frame in one read, is therefore done without
a state machine; fragments, control frames between them and frames in pieces go the long way round.
"""

from __future__ import annotations

import base64
import hashlib
import os
from struct import pack, unpack_from

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_POOL = 4096


class Broken(Exception):
    """The other end does not keep to the protocol; `code` is what to close with."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Masks:
    """Four unpredictable bytes for each frame of a client, drawn from the system's randomness a page at a time."""

    def __init__(self) -> None:
        self._pool = b""
        self._at = 0

    def next(self) -> bytes:
        if self._at >= len(self._pool):
            self._pool, self._at = os.urandom(_POOL), 0
        self._at += 4
        return self._pool[self._at - 4 : self._at]


class WebSocketReader:
    """Bytes in, whole messages out. A server's peer must mask, a client's must not."""

    def __init__(self, *, masked: bool, limit: int) -> None:
        self._masked = masked
        self._limit = limit
        self._rest = b""
        self._parts: list[bytes] = []  # of a message in fragments
        self._kind = 0
        self._size = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(opcode, payload) of every message and control frame that is now whole."""
        if not self._rest and not self._parts and len(data) >= 6:
            size = data[1] & 127
            if data[0] == 0x81 and size < 126:  # one small text frame, whole
                if self._masked and data[1] & 128 and len(data) == size + 6:
                    return [(TEXT, unmasked(data[6:], data[2:6]))]
                if not self._masked and data[1] == size and len(data) == size + 2:
                    return [(TEXT, data[2:])]
        self._rest += data
        found: list[tuple[int, bytes]] = []
        while (frame := self._frame()) is not None:
            if (message := self._joined(*frame)) is not None:
                found.append(message)
        return found

    def _frame(self) -> tuple[int, bool, bytes] | None:
        data = self._rest
        if len(data) < 2:
            return None
        opcode, last, size, at = data[0] & 15, bool(data[0] & 128), data[1] & 127, 2
        if data[0] & 0x70 or opcode not in (0, TEXT, BINARY, CLOSE, PING, PONG):
            raise Broken(1002, "a frame of an unknown kind")
        if bool(data[1] & 128) is not self._masked:
            raise Broken(1002, "a frame is masked by the client, and only by it")
        if opcode >= CLOSE and (not last or size > 125):
            raise Broken(1002, "a control frame in pieces")
        if size >= 126:
            at = 4 if size == 126 else 10
            if len(data) < at:
                return None
            size = unpack_from("!H" if at == 4 else "!Q", data, 2)[0]
        if size + self._size > self._limit:
            raise Broken(1009, "a message is too large")
        head = at + (4 if self._masked else 0)
        if len(data) < head + size:
            return None
        payload, self._rest = data[head : head + size], data[head + size :]
        return opcode, last, unmasked(payload, data[at:head]) if self._masked else payload

    def _joined(self, opcode: int, last: bool, payload: bytes) -> tuple[int, bytes] | None:
        if opcode >= CLOSE:
            return opcode, payload
        if (opcode == 0) is not bool(self._kind):
            raise Broken(1002, "fragments out of order")
        if last and not self._kind:
            return opcode, payload
        self._kind = self._kind or opcode
        self._parts.append(payload)
        self._size += len(payload)
        if not last:
            return None
        whole, kind = b"".join(self._parts), self._kind
        self._parts, self._kind, self._size = [], 0, 0
        return kind, whole


def frame(opcode: int, payload: bytes, mask: bytes | None = None) -> bytes:
    size, flag = len(payload), 0 if mask is None else 128
    if size < 126:
        head = bytes((128 | opcode, flag | size))
    elif size < 65536:
        head = pack("!BBH", 128 | opcode, flag | 126, size)
    else:
        head = pack("!BBQ", 128 | opcode, flag | 127, size)
    return head + payload if mask is None else head + mask + unmasked(payload, mask)


def closing(code: int, why: str = "") -> bytes:
    """The payload of a close frame."""
    return pack("!H", code) + why.encode()[:120]


def unmasked(payload: bytes, mask: bytes) -> bytes:
    """Masked with `mask`, or the masking taken off: it is its own inverse."""
    size = len(payload)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


def accept_key(key: bytes) -> bytes:
    """What a server answers to `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
