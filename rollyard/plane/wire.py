"""The native API's JSON: RFC 3339 times in UTC, one error shape, bodies checked against their types and sizes."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
from rollyard.core.plane import ApiKey, EnvRecord, Happening, Instance, WarmPool

T = TypeVar("T")
MAX_BODY = 2**20


def rfc3339(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def env_json(record: EnvRecord) -> dict[str, Any]:
    times = {name: rfc3339(getattr(record, name)) for name in ("created_at", "updated_at", "released_at")}
    return {"id": record.id, **msgspec.structs.asdict(record), **times}


def instance_json(instance: Instance) -> dict[str, Any]:
    shown = msgspec.structs.asdict(instance)
    for hidden in ("ref", "settle_by", "plan"):
        del shown[hidden]
    for name in ("created_at", "updated_at", "expires_at", "last_seen_at", "ended_at"):
        shown[name] = rfc3339(shown[name])
    return {**shown, "image": instance.plan.image, "ttl_s": instance.plan.ttl_s, "port": instance.plan.port}


def happening_json(line: Happening) -> dict[str, Any]:
    return {"at": rfc3339(line.at), "state": line.state, "reason": line.reason}


def pool_json(pool: WarmPool, live: int | None) -> dict[str, Any]:
    shown = {"name": pool.name, "size": pool.size, "created_at": rfc3339(pool.created_at), "live": live}
    return {**shown, "instance": msgspec.json.decode(pool.plan)}


def key_json(key: ApiKey) -> dict[str, Any]:
    shown = msgspec.structs.asdict(key)
    del shown["digest"]
    return {**shown, "created_at": rfc3339(key.created_at), "revoked_at": rfc3339(key.revoked_at)}


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
    except (msgspec.MsgspecError, ValueError) as error:
        raise PlaneInvalid(f"the body is not what this call takes: {error}") from error


def number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 9:
        raise PlaneInvalid(f"{name} is not a number")
    return int(text)
