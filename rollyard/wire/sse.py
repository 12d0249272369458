"""Server-sent events: framing out, parsing in.

The parser takes pieces split anywhere, also inside a CRLF or a UTF-8 sequence, lines that end in LF, CR or CRLF, comments,
and data that spans lines. It joins bytes only when a line is complete, so many small pieces stay linear.
"""

from __future__ import annotations

import msgspec

from rollyard.core.errors import UpstreamError

MAX_EVENT = 128 * 2**20

DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"


class SseEvent(msgspec.Struct, frozen=True):
    data: bytes
    event: str = "message"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` is JSON from an encoder and holds no line break."""
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


class SseParser:
    """Feed it bytes, take events."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of a line that is not complete yet
        self._data: list[bytes] = []
        self._event = ""
        self._held = 0
        self._after_cr = False
        self._started = False

    def feed(self, piece: bytes) -> list[SseEvent]:
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return []
        self._held += len(piece)
        if self._held > MAX_EVENT:
            raise UpstreamError(f"one event of the stream exceeds {MAX_EVENT} bytes", status=502)
        if b"\n" not in piece and b"\r" not in piece:
            self._pieces.append(piece)
            return []
        self._pieces.append(piece)
        lines = b"".join(self._pieces).splitlines()
        self._pieces = []
        if piece.endswith(b"\r"):
            self._after_cr = True
        elif not piece.endswith(b"\n"):
            self._pieces.append(lines.pop())
        return self._events(lines)

    def close(self) -> list[SseEvent]:
        """What an unfinished last event holds: some servers end without the blank line."""
        lines = [b"".join(self._pieces), b""] if self._pieces else [b""]
        self._pieces = []
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> list[SseEvent]:
        events: list[SseEvent] = []
        for line in lines:
            if not self._started:
                self._started = True
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line:
                if self._data:
                    events.append(SseEvent(b"\n".join(self._data), self._event or "message"))
                self._data, self._event, self._held = [], "", 0
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._event = value.decode("utf-8", "replace")
        return events
