"""Refusals in the shape that a Fleet client reads: `{"detail": words}` or `{"detail": {...}}`, the status telling the kind."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from rollyard.core.errors import ConfigError, EnvError, Error, PlaneError, SandboxGone, SandboxUnavailable, Unsupported


class FleetRefusal(Exception):
    def __init__(self, status: int, detail: str | dict[str, Any]) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


def refuse(error: FleetRefusal | Error) -> JSONResponse:
    if isinstance(error, FleetRefusal):
        return JSONResponse({"detail": error.detail}, error.status)
    return JSONResponse({"detail": str(error)}, _status(error))


def _status(error: Error) -> int:
    if isinstance(error, PlaneError):
        return error.status
    if isinstance(error, SandboxGone):
        return 410
    if isinstance(error, SandboxUnavailable):
        return 503
    if isinstance(error, Unsupported):
        return 501
    if isinstance(error, (ConfigError, EnvError)):
        return 400
    return 502
