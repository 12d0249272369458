"""What every REST endpoint shares: who asks, the body, one page of a list, and errors in the shape that clients read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error, SandboxGone
from rollyard.core.plane import ApiKey
from rollyard.plane.compat.e2b.errors import E2bRefusal, rest
from rollyard.plane.compat.e2b.instance_boxes import InstanceBoxes
from rollyard.plane.http.wire import MAX_BODY, raw_body

_PAGE = 100
Endpoint = Callable[[Request, ApiKey], Awaitable[Response]]


def guard(boxes: InstanceBoxes, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request, await boxes.admit(request.headers.get("x-api-key", "")))
        except SandboxGone:
            return JSONResponse({"code": 404, "message": "Sandbox not found"}, 404)
        except (Error, E2bRefusal) as error:
            return rest(error)

    return answer


async def refuse(request: Request, caller: ApiKey) -> Response:
    raise E2bRefusal("unimplemented", f"{request.method} {request.url.path} is not served here")


async def read_json(request: Request) -> dict[str, Any]:
    body = await raw_body(request, MAX_BODY)
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except BAD_JSON as error:
        raise E2bRefusal("invalid_argument", f"not a JSON object: {error}") from error


def one_page(request: Request, found: Sequence[dict[str, Any]], key: str) -> JSONResponse:
    """The page that was asked for; the token of the next one is the last line's name."""
    query = request.query_params
    after = _cursor(query.get("nextToken"))
    start = next((at + 1 for at, one in enumerate(found) if one[key] == after), 0) if after else 0
    number = query.get("limit") or str(_PAGE)
    if not number.isdigit() or len(number) > 9:
        raise E2bRefusal("invalid_argument", "limit is not a number")
    limit = max(1, min(_PAGE, int(number)))
    page = found[start : start + limit]
    headers: dict[str, str] = {}
    if start + limit < len(found):
        headers["x-next-token"] = base64.urlsafe_b64encode(str(page[-1][key]).encode()).decode()
    return JSONResponse(list(page), headers=headers)


def _cursor(token: str | None) -> str | None:
    try:
        return base64.urlsafe_b64decode(token).decode() if token else None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise E2bRefusal("invalid_argument", "nextToken is not one of ours") from error
