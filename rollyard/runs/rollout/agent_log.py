"""All that an agent printed, both streams as they came, with a bound: of more than that the beginning and the end are kept, and
a line between them says how much is missing."""

from __future__ import annotations

from typing import BinaryIO

HEAD_KEPT = 2**20
TAIL_KEPT = 7 * 2**20


class AgentLog:
    """`copy` is given all of it, without the bound."""

    def __init__(self, head: int = HEAD_KEPT, tail: int = TAIL_KEPT, *, copy: BinaryIO | None = None) -> None:
        self._copy = copy
        self._head_kept, self._tail_kept = head, tail
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        if self._copy is not None:
            self._copy.write(data)
        room = self._head_kept - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (excess := len(self._tail) - self._tail_kept) > 0:
            del self._tail[:excess]
            self._dropped += excess

    def end(self, size: int) -> bytes:
        """Its last bytes."""
        if len(self._tail) >= size:
            return bytes(self._tail[-size:])
        return self.read()[-size:]

    def read(self) -> bytes:
        missing = f"\n[{self._dropped} bytes are left out here]\n".encode() if self._dropped else b""
        return bytes(self._head) + missing + bytes(self._tail)
