"""ROCK's envelope and its callers: who asks is known by the key in the URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.errors import Error, PlaneForbidden, PlaneUnauthorized
from rollyard.core.plane import ApiKey, Instance
from rollyard.plane.http.wire import answer, status_of
from rollyard.plane.service.access import Access, check_visible
from rollyard.plane.service.instances import Instances

T = TypeVar("T")
Endpoint = Callable[[Request, ApiKey], Awaitable[Any]]
_OK, _CLIENT, _SERVER = 2000, 4000, 5000


class RockCallers:
    def __init__(self, access: Access, instances: Instances) -> None:
        self._access, self._instances = access, instances

    async def caller(self, request: Request) -> ApiKey:
        found = await self._access.caller(f"Bearer {request.path_params['key']}")
        if found.role == "agent":
            raise PlaneForbidden("a key of role agent may not do this")
        return found

    async def find_own(self, caller: ApiKey, sandbox_id: str) -> Instance:
        found = await self._instances.get(sandbox_id)
        check_visible(caller, found)
        return found

    def envelope(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """`{status, message, error, result}`: the client reads `status` and not HTTP's, except for a key that is wrong."""

        async def respond(request: Request) -> Response:
            try:
                result = await endpoint(request, await self.caller(request))
            except PlaneUnauthorized as error:
                return answer({"status": "Failed", "message": error.message, "error": error.message}, 401)
            except (Error, OSError, TimeoutError) as error:
                words = str(error) or type(error).__name__
                status = status_of(error)[0] if isinstance(error, Error) else 500
                failed = {"code": _CLIENT if status < 500 else _SERVER, "exit_code": -1, "failure_reason": words}
                return answer({"status": "Failed", "message": words, "error": words, "result": failed})
            return answer({"status": "Success", "message": None, "error": None, "result": result})

        return respond

    def without_envelope(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Without an envelope, with HTTP's own status."""

        async def respond(request: Request) -> Response:
            try:
                return answer(await endpoint(request, await self.caller(request)))
            except Error as error:
                return answer({"detail": str(error)}, status_of(error)[0])
            except (OSError, TimeoutError) as error:
                return answer({"detail": str(error) or "the environment did not answer"}, 502)

        return respond
