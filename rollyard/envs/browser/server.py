"""`BrowserServer`: leases over HTTP, as an ASGI application.

Two keys, two APIs. The server's key makes, sees, steers and ends leases. A lease's own key reaches `/leases/{id}/mcp` of
that lease, where the `computer` tool is, and nothing else: an agent can neither steer its browser to another origin nor
end a lease.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, EnvUnavailable, EpisodeLost, Error
from rollyard.envs.browser.leases import BrowserLease, Browsers

T = TypeVar("T", bound=msgspec.Struct)
_BODY = 64 * 1024


class _Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttl_s: float | None = None
    labels: dict[str, str] = {}


class _Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class BrowserServer:
    def __init__(self, browsers: Browsers, *, key: str) -> None:
        if not key.strip():
            raise ConfigError("the browser server needs a key", hint="leases are worth a machine: set one")
        self._browsers = browsers
        self._key = key
        self._app = Starlette(
            routes=[
                Route("/health", _json_endpoint(self._health), methods=["GET"]),
                Route("/leases", _json_endpoint(self._list), methods=["GET"]),
                Route("/leases", _json_endpoint(self._create), methods=["POST"]),
                Route("/leases/{id}", _json_endpoint(self._get), methods=["GET"]),
                Route("/leases/{id}", _json_endpoint(self._end), methods=["DELETE"]),
                Route("/leases/{id}/navigate", _json_endpoint(self._navigate), methods=["POST"]),
                Route("/leases/{id}/health", _json_endpoint(self._check), methods=["GET"]),
            ],
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == "/health":
            await self._app(scope, receive, send)
            return
        given = _bearer(scope)
        if compare_digest(given.encode(), self._key.encode()):
            await self._app(scope, receive, send)
        elif (held := self._browsers.of_key(given)) is None:
            await JSONResponse({"error": "a key is needed"}, status_code=401)(scope, receive, send)
        elif scope.get("path") != f"/leases/{held.id}/mcp":
            await JSONResponse({"error": "this key is for one lease's tools"}, status_code=403)(scope, receive, send)
        else:
            scope.setdefault("state", {})["rollout_id"] = held.id
            await held.toolset(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self._browsers:
            yield

    async def _health(self, request: Request) -> Any:
        return {
            "status": "healthy",
            "leases": len(self._browsers.held),
            "capacity": self._browsers.limits.capacity,
        }

    async def _list(self, request: Request) -> Any:
        return {"leases": [_describe_lease(held, request) for held in self._browsers.held.values()]}

    async def _create(self, request: Request) -> Any:
        wanted = await _body(request, _Wanted)
        held = await self._browsers.create(wanted.ttl_s, wanted.labels)
        return {**_describe_lease(held, request), "key": held.key}

    async def _get(self, request: Request) -> Any:
        return _describe_lease(self._browsers.get(request.path_params["id"]), request)

    async def _end(self, request: Request) -> Any:
        return {"ended": await self._browsers.end(request.path_params["id"])}

    async def _navigate(self, request: Request) -> Any:
        page = await _body(request, _Page)
        await self._browsers.navigate(request.path_params["id"], page.url)
        return {"url": page.url}

    async def _check(self, request: Request) -> Any:
        await self._browsers.check(request.path_params["id"])
        return {"status": "healthy"}


def _describe_lease(held: BrowserLease, request: Request) -> dict[str, Any]:
    base = str(request.base_url).rstrip("/")
    return {
        "id": held.id,
        "mcp_url": f"{base}/leases/{held.id}/mcp",
        "expires_at": held.expires_at,
        "size": held.browser.size,
        "refused_requests": held.proxy.refused,
    }


def _bearer(scope: Scope) -> str:
    for name, value in scope.get("headers", ()):
        if name == b"authorization":
            return value.decode("latin-1").removeprefix("Bearer ").strip()
    return ""


async def _body(request: Request, kind: type[T]) -> T:
    data = await request.body()
    if len(data) > _BODY:
        raise ConfigError("the request is too large")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (*BAD_JSON, ValueError) as error:
        raise ConfigError(f"the request is not what this route takes: {error}") from error


def _json_endpoint(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Errors as `{error, hint}` with the status of their kind."""

    async def handle(request: Request) -> Response:
        try:
            return JSONResponse(await answer(request))
        except Error as error:
            return JSONResponse({"error": error.message, "hint": error.hint}, status_code=_status(error))

    return handle


def _status(error: Error) -> int:
    if isinstance(error, ConfigError):
        return 422
    if isinstance(error, EpisodeLost):
        return 404
    return 503 if isinstance(error, EnvUnavailable) else 502
