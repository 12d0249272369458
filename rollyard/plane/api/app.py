"""The native API as an application: the table of routes, the gateway, health, readiness, and the page.

Whether a role may use a route is decided here, from the table; whether a caller may see an instance, in `access.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from rollyard.core.errors import Error, PlaneForbidden
from rollyard.plane.api.handlers.bundles import SignedBundles
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.api.openapi import document
from rollyard.plane.api.routes import ROUTES, ApiRoute
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.http.wire import answer, refusal
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.drain import readiness


def plane_app(
    parts: PlaneParts, *, page: ASGIApp | None = None, public_url: str | None = None, log: RequestLog | None = None
) -> Starlette:
    described = document(ROUTES)

    async def health(request: Request) -> Response:
        return answer({"status": "ok", "engines": list(parts.instances.engines)})

    async def ready(request: Request) -> Response:
        well, error_fields = await readiness(parts.drain, parts.store, parts.instances.engines, parts.clock)
        return answer(error_fields, 200 if well else 503)

    async def openapi(request: Request) -> Response:
        return answer(described)

    routes: list[BaseRoute] = [Route("/health", health), Route("/ready", ready), Route("/openapi.json", openapi)]
    routes += [Route(entry.path, _guard(parts, entry, public_url), methods=[entry.method]) for entry in ROUTES]
    routes += [*SignedBundles(parts).routes(), *parts.gateway.routes()]
    if page is not None:
        routes.append(Mount("/page", page))
    return Starlette(
        routes=routes,
        middleware=[(log or RequestLog(parts.counters)).watch("native")],
        exception_handlers={HTTPException: _http},
    )


def _guard(parts: PlaneParts, entry: ApiRoute, public_url: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            caller = await parts.access.caller(request.headers.get("authorization"), metrics=True)
            if caller.role not in entry.roles:
                raise PlaneForbidden(
                    f"a key of role {caller.role} may not do this", hint=f"needs {', '.join(entry.roles)}"
                )
            return await entry.handler(ApiCall(parts, request, caller, public_url))
        except Error as error:
            return refusal(error)

    return endpoint


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    error_fields = {
        "code": "no_route" if status in (404, 405) else "http",
        "message": str(getattr(error, "detail", "")),
    }
    response = answer({"error": error_fields}, status)
    response.headers.update(getattr(error, "headers", None) or {})
    return response
