"""Opaque cursors: where a page ended, as text that callers hand back and do not read."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import PlaneInvalid


def write_cursor(*keys: str) -> str:
    return urlsafe_b64encode(msgspec.json.encode(keys)).decode().rstrip("=")


def read_cursor(text: str | None, keys: int) -> list[str] | None:
    if not text:
        return None
    try:
        found = msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=list[str])
    except (*BAD_JSON, ValueError):
        found = []
    if len(found) != keys:
        raise PlaneInvalid("this cursor is not one of this list's", hint="start again without one")
    return found
