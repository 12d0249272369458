"""Server-sent events, as the gate writes them."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` is JSON from an encoder and holds no line break."""
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
