"""Refusals in the shape that a Fleet client reads: `{"detail": words}` or `{"detail": {...}}`, the status telling the kind."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from rollyard.core.errors import EnvError, Error, SandboxUnavailable
from rollyard.plane.http.wire import status_of


class FleetRefusal(Exception):
    def __init__(self, status: int, detail: str | dict[str, Any]) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


def refuse(error: FleetRefusal | Error) -> JSONResponse:
    if isinstance(error, FleetRefusal):
        return JSONResponse({"detail": error.detail}, error.status)
    return JSONResponse({"detail": str(error)}, _status(error))


def _status(error: Error) -> int:
    if isinstance(error, SandboxUnavailable):
        return 503
    return 400 if isinstance(error, EnvError) else status_of(error)[0]
