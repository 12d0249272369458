"""`ApiCall`: what a handler of the native API is given."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from rollyard.core.plane import ApiKey
from rollyard.plane.parts import PlaneParts


class ApiCall(NamedTuple):
    """One admitted request. `public_url` is where callers reach the plane, where that is known."""

    parts: PlaneParts
    request: Request
    caller: ApiKey
    public_url: str | None

    @property
    def base_url(self) -> str:
        return self.public_url or str(self.request.base_url)
