"""The two shapes an E2B client reads errors in: REST with a number, Connect with a word. One table maps ours to both."""

from __future__ import annotations

import math
from typing import NamedTuple

from starlette.responses import JSONResponse

from rollyard.core.errors import (
    ConfigError,
    Error,
    PathError,
    PlaneError,
    PlaneQuota,
    PlaneRateLimited,
    SandboxGone,
    SandboxUnavailable,
    Unsupported,
)

_PATHS = {
    "ENOENT": "not_found",
    "EEXIST": "already_exists",
    "ENOSPC": "resource_exhausted",
    "EDQUOT": "resource_exhausted",
    "EACCES": "permission_denied",
    "EPERM": "permission_denied",
    "EROFS": "permission_denied",
}
_PLANE = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "already_exists",
    410: "not_found",
    413: "invalid_argument",
    429: "resource_exhausted",
    501: "unimplemented",
    502: "unavailable",
}
_STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 507,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}


class E2bRefusal(Exception):
    """An answer that is not a success. `code` is Connect's word for it; `status` overrules the usual number."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.status = status or _STATUS.get(code, 500)


class ErrorBody(NamedTuple):
    code: str
    status: int
    message: str


def explain(error: Error | E2bRefusal) -> ErrorBody:
    """An error of ours as a client may see it."""
    if isinstance(error, E2bRefusal):
        return ErrorBody(error.code, error.status, error.message)
    if isinstance(error, PathError):
        code = _PATHS.get(error.errno_name, "invalid_argument")
    elif isinstance(error, SandboxGone):
        return ErrorBody("unavailable", 502, "The sandbox was not found")
    elif isinstance(error, PlaneError):
        return ErrorBody(_PLANE.get(error.status, "internal"), error.status, str(error))
    elif isinstance(error, Unsupported):
        code = "unimplemented"
    elif isinstance(error, ConfigError):
        code = "invalid_argument"
    elif isinstance(error, SandboxUnavailable):
        code = "unavailable"
    else:
        code = "internal"
    return ErrorBody(code, _STATUS.get(code, 500), str(error))


def rest(error: Error | E2bRefusal) -> JSONResponse:
    found = explain(error)
    headers: dict[str, str] = {}
    if isinstance(error, SandboxUnavailable | PlaneRateLimited) and error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, PlaneQuota):
        headers["Should-Retry"] = "false"  # only the owner can make room; the SDK would wait for nothing
    return JSONResponse({"code": found.status, "message": found.message}, found.status, headers)


def connect(error: Error | E2bRefusal) -> JSONResponse:
    found = explain(error)
    if found.status == 502:
        return JSONResponse({"code": 502, "message": found.message}, 502)
    return JSONResponse({"code": found.code, "message": found.message}, found.status)
