"""The shape every dialect has: pure functions between bytes and `Call`/`Reply`. No I/O, no state but the memo it is given.

Two directions. Facing an agent: `decode` its request, `encode` the answer (whole, or as SSE frames). Facing an upstream:
`encode_request`, then `decode_reply` (or feed an `Accumulator` with its stream).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling
from rollyard.core.message import Message

# digest of one raw history item -> its canonical messages; kept per session, so an old item is hashed, not parsed again
Memo = MutableMapping[bytes, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP side knows of a request before its dialect reads it."""

    call_id: str
    rollout_id: str
    body: bytes
    headers: Mapping[str, str]  # lower-case names
    model: str | None = None  # from the path (Gemini)
    stream: bool | None = None  # from the path (Gemini)
    received_at: float = 0.0


class Accumulator(Protocol):
    """Takes an upstream's stream in pieces of any size; `reply` is complete after `done` is True."""

    def feed(self, data: bytes) -> None: ...
    @property
    def done(self) -> bool: ...
    def reply(self) -> Reply: ...


class Codec(Protocol):
    name: Dialect
    upstream_path: str  # where an upstream serves it, below its base url (`/chat/completions` below `/v1`)

    def decode(self, request: Request, memo: Memo | None = None) -> Call: ...
    def encode(self, call: Call, reply: Reply) -> bytes: ...
    def stream(self, call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
        """SSE frames of a whole reply. `opened` is True when `opening` was sent already."""
        ...

    def opening(self, call: Call) -> bytes:
        """Frames that may be sent before the answer is known; b"" where the dialect has none."""
        ...

    def keepalive(self, call: Call) -> bytes:
        """A frame that real agents of this dialect accept while they wait."""
        ...

    def error(self, status: int, code: str, message: str) -> bytes: ...
    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes: ...
    def encode_request(self, call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any]) -> bytes:
        """A non-streaming request body for an upstream of this dialect, from any call whatever dialect it came in.
        `extra` is merged at the top level (token id and logprob requests)."""
        ...

    def decode_reply(self, body: bytes) -> Reply: ...
    def accumulator(self) -> Accumulator: ...
    def models(self, names: list[str]) -> bytes: ...
    def count_tokens(self, count: int) -> bytes: ...


def text_message(text: str) -> Message:
    from rollyard.core.message import Text

    return Message("assistant", (Text(text),))
