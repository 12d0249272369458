"""What the admin's and the trainer's routes share: bodies in, JSON out, and a refusal with its status."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")


class OperatorRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read_body(request: Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.body() or b"{}", type=kind)
