"""Connect's stream frames as JSON: one flag byte, four bytes of length, a body. The last frame of a stream has flag 2."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.plane.compat.e2b.errors import E2bRefusal

CONTENT_TYPE = "application/connect+json"
_HEAD = struct.Struct(">BI")
_END = 2


def message(body: dict[str, Any]) -> bytes:
    raw = msgspec.json.encode(body)
    return _HEAD.pack(0, len(raw)) + raw


def end(error: dict[str, str] | None = None) -> bytes:
    raw = msgspec.json.encode({"error": error} if error else {})
    return _HEAD.pack(_END, len(raw)) + raw


def only_message(body: bytes) -> dict[str, Any]:
    """The one frame of a server-stream request."""
    try:
        flag, size = _HEAD.unpack_from(body)
        if flag != 0 or len(body) != _HEAD.size + size:
            raise E2bRefusal("invalid_argument", "one uncompressed frame is expected")
        return msgspec.json.decode(body[_HEAD.size :], type=dict[str, Any])
    except (*BAD_JSON, struct.error) as error:
        raise E2bRefusal("invalid_argument", f"not a frame: {error}") from error
