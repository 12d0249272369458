"""What the admin's and the trainer's routes share: bodies in, JSON out, and a refusal with its status."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, Error, GateError, PolicyError, ReplyRefused, StoreError

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class OperatorRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read_body(request: Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.body() or b"{}", type=kind)


def read_number(flags: Mapping[str, str], name: str, default: float, *, least: float = 0.0, most: float) -> float:
    """A number of the query, within its bounds."""
    text = flags.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise OperatorRefused(400, f"{name}={text} is no number")
    return min(max(value, least), most)


async def answer(endpoint: Endpoint, request: Request) -> Response:
    """What an endpoint says, or the status and reason of what it refuses."""
    try:
        return await endpoint(request)
    except GateError as error:
        return as_json({"error": error.message}, error.status)
    except OperatorRefused as error:
        return as_json({"error": str(error)}, error.status)
    except StoreError as error:  # a full disk, a database that is away: the operator asks again once it is mended
        return as_json({"error": str(error)}, 503)
    except ReplyRefused as error:
        return as_json({"error": error.message}, 409)
    except (*BAD_JSON, ConfigError, PolicyError) as error:
        return as_json({"error": error.message if isinstance(error, Error) else str(error)}, 400)
