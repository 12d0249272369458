"""Bodies of HTTP requests in and out: bounded, JSON, and refused in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive

from rollyard.envs.results import EnvRefused

LIMIT = 100 * 2**20
STATUS = {
    "VALIDATION_ERROR": 422,
    "INVALID_JSON": 400,
    "BAD_INDEX": 400,
    "NOT_FOUND": 404,
    "SESSION_ERROR": 404,
    "UNKNOWN_TYPE": 404,
    "TOO_LARGE": 413,
    "CANCELLED": 409,
    "EXECUTION_ERROR": 424,
    "UNSUPPORTED": 501,
    "CAPACITY_REACHED": 503,
    "FACTORY_ERROR": 503,
    "DEADLINE": 504,
}


def status_of(error: EnvRefused) -> int:
    """424 (failed dependency) is the environment's own failure: the server did its part."""
    return STATUS[error.code]


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def refusal(error: EnvRefused) -> Response:
    return json_response({"detail": error.message, "code": error.code}, status_of(error))


class RequestBody:
    """A request's body, read once, and given again to an application behind."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = bytearray()
        self._given = False

    async def read_all(self) -> bytes:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise EnvRefused("INVALID_JSON", "the body was cut off")
            self._read += message.get("body", b"")
            if len(self._read) > LIMIT:
                raise EnvRefused("TOO_LARGE", "the body is too large")
            more = message.get("more_body", False)
        return bytes(self._read)

    async def replay(self) -> Message:
        if self._given:
            return await self._receive()
        self._given = True
        return {"type": "http.request", "body": bytes(self._read), "more_body": False}


def object_of(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise EnvRefused("INVALID_JSON", f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EnvRefused("VALIDATION_ERROR", "the body must be an object")
    return value


def number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise EnvRefused("VALIDATION_ERROR", f"{name} must be a number of at least 0")
    return float(value)
