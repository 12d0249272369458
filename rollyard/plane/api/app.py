"""The native API as an application: the table of routes, the gateway, health, readiness, and the page.

Whether a role may use a route is decided here, from the table; whether a caller may see an instance, in `access.py`. No path,
header or query is ever written to the log: some of them are secrets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from rollyard.core.errors import Error, PlaneForbidden
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.plane import ApiKey
from rollyard.plane.api.handlers.bundles import BundleHandlers
from rollyard.plane.api.handlers.envs import EnvHandlers
from rollyard.plane.api.handlers.instances import InstanceHandlers
from rollyard.plane.api.handlers.owners import OwnerHandlers
from rollyard.plane.api.handlers.watching import WatchHandlers
from rollyard.plane.api.openapi import document
from rollyard.plane.api.routes import ROUTES, ApiRoute
from rollyard.plane.http.wire import answer, refusal
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.drain import readiness

_log = Log("rollyard.plane")
_Handler = Callable[[Request, ApiKey], Awaitable[Response]]


def plane_app(
    parts: PlaneParts, *, page: ASGIApp | None = None, public_url: str | None = None, log_requests: bool = False
) -> Starlette:
    bundles = BundleHandlers(parts, public_url)
    groups: dict[str, object] = {
        "envs": EnvHandlers(parts),
        "instances": InstanceHandlers(parts, public_url),
        "watch": WatchHandlers(parts),
        "bundles": bundles,
        "owners": OwnerHandlers(parts),
    }
    described = document(ROUTES)

    async def health(request: Request) -> Response:
        return answer({"status": "ok", "engines": list(parts.instances.engines)})

    async def ready(request: Request) -> Response:
        well, told = await readiness(parts.duty, parts.store, parts.instances.engines, parts.clock)
        return answer(told, 200 if well else 503)

    async def openapi(request: Request) -> Response:
        return answer(described)

    routes: list[BaseRoute] = [Route("/health", health), Route("/ready", ready), Route("/openapi.json", openapi)]
    for entry in ROUTES:
        group, _, method = entry.handler.partition(".")
        handler: _Handler = getattr(groups[group], method)
        routes.append(Route(entry.path, _guard(parts, entry, handler, log_requests), methods=[entry.method]))
    routes += [*bundles.routes(), *parts.gateway.routes()]
    if page is not None:
        routes.append(Mount("/page", page))
    return Starlette(routes=routes, exception_handlers={HTTPException: _http, Exception: _to_incident})


def _guard(
    parts: PlaneParts, entry: ApiRoute, handler: _Handler, log_requests: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def admitted(request: Request) -> tuple[Response, ApiKey | None]:
        caller = None
        try:
            caller = await parts.access.caller(request.headers.get("authorization"))
            if caller.role not in entry.roles:
                raise PlaneForbidden(
                    f"a key of role {caller.role} may not do this", hint=f"needs {', '.join(entry.roles)}"
                )
            return await handler(request, caller), caller
        except Error as error:
            return refusal(error), caller

    async def endpoint(request: Request) -> Response:
        began = time.perf_counter()
        response, caller = await admitted(request)
        took = time.perf_counter() - began
        parts.counters.count_answer(entry.method, entry.path, response.status_code, took)
        if log_requests:
            who: dict[str, Any] = (
                {} if caller is None else {"key": caller.id, "owner": caller.owner, "role": caller.role}
            )
            what = {"method": entry.method, "route": entry.path, "status": response.status_code}
            _log.info("request", **what, ms=round(took * 1000, 1), instance=request.path_params.get("id"), **who)
        return response

    return endpoint


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    told = {"code": "no_route" if status in (404, 405) else "http", "message": str(getattr(error, "detail", ""))}
    response = answer({"error": told}, status)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def _to_incident(request: Request, error: Exception) -> Response:
    incident = new_id("err")
    _log.error("a request failed", id=incident, method=request.method, exc_info=error)
    told = {"code": "internal", "message": "the server failed; its log says why", "id": incident}
    return answer({"error": told}, 500)
