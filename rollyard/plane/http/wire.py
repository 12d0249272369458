"""What every API of the plane does with HTTP: answers as JSON, one error shape, bodies checked against their types and sizes."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import (
    ConfigError,
    Error,
    PlaneError,
    PlaneInvalid,
    PlaneRateLimited,
    PlaneTooLarge,
    SandboxGone,
    Unsupported,
)
from rollyard.core.ids import new_id

T = TypeVar("T")
MAX_BODY = 2**20


def answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refusal(error: Error) -> Response:
    """Every refusal has an id of its own, for the log and the person who asks."""
    status, code = status_of(error)
    shown = {"code": code, "message": error.message, "hint": error.hint, "id": new_id("err")}
    response = answer({"error": shown}, status)
    if isinstance(error, PlaneRateLimited) and error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def status_of(error: Error) -> tuple[int, str]:
    """The HTTP status of an error, and its machine word."""
    if isinstance(error, PlaneError):
        return error.status, error.code
    if isinstance(error, Unsupported):
        return 501, "engine_cannot"
    if isinstance(error, ConfigError):
        return 400, "invalid"
    if isinstance(error, SandboxGone):
        return 410, "gone"
    return 502, "unavailable"


async def raw_body(request: Request, limit: int) -> bytes:
    """Counted while it comes: what a header promises does not matter."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise PlaneTooLarge(f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def body(request: Request, kind: type[T]) -> T:
    data = await raw_body(request, MAX_BODY)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (*BAD_JSON, ValueError) as error:
        raise PlaneInvalid(f"the body is not what this call takes: {error}") from error


def number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 9:
        raise PlaneInvalid(f"{name} is not a number")
    return int(text)
