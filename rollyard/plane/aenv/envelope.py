"""AEnvironment's words on the wire: the envelope, durations as Go writes them, quantities as Kubernetes does."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from rollyard.core.errors import Error, PlaneInvalid
from rollyard.plane.wire import answer, status_of

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?)?B?")
_BYTES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


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


def megabytes(value: Any) -> int | None:
    """`2G`, `2Gi`, `512Mi` or bytes."""
    if value in (None, ""):
        return None
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        raise PlaneInvalid(f"{value!r} is not an amount of memory such as 2Gi")
    return max(1, round(float(found[1]) * _BYTES.get(found[2] or "", 1) / 2**20))


def cores(value: Any) -> float | None:
    """`2`, `2C` or `500m`."""
    if value in (None, ""):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([Cm])?", str(value).strip())
    if found is None:
        raise PlaneInvalid(f"{value!r} is not a number of processors such as 2 or 500m")
    return float(found[1]) / (1000 if found[2] == "m" else 1)


def read(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError) as error:
        raise PlaneInvalid(f"the body is not a JSON object: {error}") from error
