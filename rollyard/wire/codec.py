"""The shape every dialect has: pure functions between bytes and `Call`/`Reply`. No I/O, no state but the memo it is given.

Two directions. Facing an agent: `decode` its request, `encode` the answer (whole, or as SSE frames). Facing an upstream:
`encode_request`, then `decode_reply`; an upstream is never asked for a stream. Bytes from either side are hostile: the
only errors that leave a codec are `BadRequest` and `TooLarge` (agent side) and `UpstreamError` (upstream side).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal, Protocol

import msgspec

from rollyard.core.call import Call, Dialect, Reply, Sampling

MAX_BODY = 48 * 2**20  # bytes of one request; `decode` raises TooLarge above it

# digest of one raw history item -> its canonical messages; kept per session, so an old item is hashed, not parsed again
Memo = MutableMapping[bytes, Any]


class WireRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP side knows of a request before its dialect reads it."""

    call_id: str
    rollout_id: str
    body: bytes
    headers: Mapping[str, str]  # lower-case names, already allow-listed: they become `Call.headers`
    model: str | None = None  # from the path (Gemini)
    stream: bool | None = None  # from the path (Gemini)
    framing: Literal["sse", "array"] = "sse"  # from the query (Gemini)
    received_at: float = 0.0


class Codec(Protocol):
    name: Dialect
    upstream_path: str  # where an upstream serves it, below its base url; Gemini's holds `{model}`

    def decode(self, request: WireRequest, memo: Memo | None = None) -> Call: ...
    def encode(self, call: Call, reply: Reply) -> bytes: ...
    def stream(self, call: Call, reply: Reply, *, opened: bool = False) -> Iterator[bytes]:
        """Frames of a whole reply. `opened` is True when `opening` was sent already."""
        ...

    def stream_type(self, call: Call) -> str:
        """The content type of what `stream` yields."""
        ...

    def opening(self, call: Call) -> bytes:
        """Frames that may be sent before the answer is known; b"" where the dialect has none."""
        ...

    def keepalive(self, call: Call) -> bytes:
        """A frame that real agents of this dialect accept while they wait."""
        ...

    def error(self, status: int, code: str, message: str) -> bytes: ...
    def stream_error(self, call: Call, status: int, code: str, message: str) -> bytes: ...
    def encode_request(
        self, call: Call, *, model: str, sampling: Sampling, extra: Mapping[str, Any], memo: Memo | None = None
    ) -> bytes:
        """A non-streaming request body for an upstream of this dialect, from any call whatever dialect it came in.
        `extra` is merged at the top level (token id and logprob requests). A call that came in this very dialect is
        patched, not rebuilt, so nothing its agent sent is lost: drop its `raw` when you have changed its messages. With a
        rollout's `memo`, what surrounds a history and was patched for the call before is not patched again."""
        ...

    def decode_reply(self, body: bytes, call: Call | None = None, memo: Memo | None = None) -> Reply:
        """With `call`, tool names that were flattened for the upstream come back in their namespace. With a rollout's
        `memo`, prompt ids that the turn before had are compared, not parsed again."""
        ...

    def model(self, name: str) -> bytes: ...
    def models(self, names: list[str]) -> bytes: ...
    def count_tokens(self, count: int) -> bytes: ...
