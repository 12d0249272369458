"""AEnvironment's words on the wire: the envelope, and durations as Go writes them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, PlaneInvalid
from rollyard.plane.http.wire import answer, status_of

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")


def ok(data: Any) -> Response:
    return answer({"success": True, "code": 0, "message": "", "data": data})


def failure(error: Error) -> Response:
    """`message` is what the control client shows, `error` what the data client does."""
    status, _ = status_of(error)
    return answer({"success": False, "code": status, "message": str(error), "error": str(error), "data": None}, status)


def seconds(text: str) -> float | None:
    """`1h30m`, `90s`; None for none."""
    if not text.strip():
        return None
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text.strip()):
        raise PlaneInvalid(f"ttl {text!r} is not a duration such as 30m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


def duration(s: float) -> str:
    whole = round(s)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(parts) or "0s"


def read(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw or b"{}", type=dict[str, Any])
    except (*BAD_JSON, ValueError) as error:
        raise PlaneInvalid(f"the body is not a JSON object: {error}") from error
