"""What lies below an instance's root: its manager at `api/v1/env`, and its own server (MCP, pages) at everything else.

The two have different keys: a caller that may use the tools of an instance may not reset it, read its seed database or judge it.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from rollyard.core.errors import EnvError, Error, PlaneError, SandboxError
from rollyard.envs.fleet.verifier_code import VerifierCode, run_check
from rollyard.net.forward import ForwardLimits, Target, forward_http
from rollyard.net.forward_websocket import forward_ws
from rollyard.plane.compat.fleet.boot import reset
from rollyard.plane.compat.fleet.control import body
from rollyard.plane.compat.fleet.errors import FleetRefusal, refuse
from rollyard.plane.compat.fleet.guard import Guard
from rollyard.plane.compat.fleet.instances import WorldInstance, WorldInstances
from rollyard.plane.service.shapes import rfc3339

_BASE = "/i/{id}/api/v1/env"
_DIAL_S = 10.0
_FILE_BYTES = 10 * 2**20
Endpoint = Callable[[Request, WorldInstance], Awaitable[Response]]


class Reset(msgspec.Struct, frozen=True):
    timestamp: int | None = None
    seed: int | None = None


class Query(msgspec.Struct, frozen=True):
    query: str
    args: list[Any] | None = None
    read_only: bool | None = True


class VerifierFunction(msgspec.Struct, frozen=True):
    function_code: str
    function_name: str | None = None
    text_solution: str | None = None


class FilePath(msgspec.Struct, frozen=True):
    path: str
    include_content: bool = True
    max_content_size: int = 102_400


class Manager:
    def __init__(self, places: WorldInstances, guard: Guard, *, limits: ForwardLimits | None = None) -> None:
        self._places, self._guard = places, guard
        self._limits = limits or ForwardLimits()

    def routes(self) -> list[BaseRoute]:
        def route(path: str, endpoint: Endpoint, method: str = "POST") -> Route:
            return Route(_BASE + path, self._manage(endpoint), methods=[method])

        return [
            route("/health", self.health, "GET"),
            route("/reset", self.reset),
            route("/resources", self.resources, "GET"),
            route("/resources/sqlite/{db}/describe", self.describe, "GET"),
            route("/resources/sqlite/{db}/query", self.query),
            route("/diff/structured", self.diff),
            route("/fs/file", self.file),
            route("/fs/file/text", self.file_text),
            route("/execute_verifier_function", self.execute),
            Route("/i/{id}/api/v1/env{rest:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
            Mount("/i/{id}", app=self.serve_instance),
            Mount("/p/{token}/{id}", app=self.pages),
        ]

    def _manage(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                place = await self._places.find(request.path_params["id"])
                self._guard.manages(request, place.owner)
                return await endpoint(request, place)
            except (FleetRefusal, Error) as error:
                return refuse(error)

        return answer

    async def _unknown(self, request: Request) -> Response:
        return refuse(FleetRefusal(501, "this part of an instance's manager is not served here"))

    async def health(self, request: Request, place: WorldInstance) -> Response:
        alive = place.status == "running"
        answer = {
            "status": "healthy" if alive else place.status,
            "timestamp": rfc3339(place.row.updated_at),
            "service": "manager",
        }
        return JSONResponse(answer)

    async def reset(self, request: Request, place: WorldInstance) -> Response:
        wanted = await body(request, Reset)
        await reset(place.sandbox, place.world, place.databases, wanted.seed)
        return JSONResponse({"success": True, "message": "reset"})

    async def resources(self, request: Request, place: WorldInstance) -> Response:
        named = [{"name": name, "type": "sqlite", "mode": _mode(name)} for name in place.world.databases]
        return JSONResponse(named)

    async def describe(self, request: Request, place: WorldInstance) -> Response:
        name = request.path_params["db"]
        answer = {"success": True, "resource_name": name, "tables": None, "error": None, "message": ""}
        try:
            answer["tables"] = msgspec.to_builtins(await place.databases.describe(name))
        except EnvError as error:
            answer.update(success=False, error=error.message, message="the database could not be described")
        return JSONResponse(answer)

    async def query(self, request: Request, place: WorldInstance) -> Response:
        name, wanted = request.path_params["db"], await body(request, Query)
        read_only = wanted.read_only is not False or _mode(name) == "ro"
        try:
            rows = await place.databases.query(name, wanted.query, wanted.args or (), read_only=read_only)
        except EnvError as error:
            return JSONResponse({"success": False, "error": error.message, "message": "the query failed"})
        message = f"only the first {len(rows.rows)} rows" if rows.truncated else ""
        return JSONResponse({"success": True, **msgspec.structs.asdict(rows), "error": None, "message": message})

    async def diff(self, request: Request, place: WorldInstance) -> Response:
        found = await place.databases.diff("seed", "current")
        return JSONResponse({"success": True, "diff": found, "message": ""})

    async def file(self, request: Request, place: WorldInstance) -> Response:
        wanted = await body(request, FilePath)
        answer: dict[str, Any] = {
            "success": True,
            "path": wanted.path,
            "exists": await place.sandbox.exists(wanted.path),
        }
        if answer["exists"]:
            stat = await place.sandbox.stat(wanted.path)
            answer.update(size=stat.size, modified_time=rfc3339(stat.mtime), file_type=stat.kind)
            if wanted.include_content and stat.kind == "file":
                answer["content"] = await self._text(place, wanted)
        return JSONResponse(answer)

    async def file_text(self, request: Request, place: WorldInstance) -> Response:
        return Response(await self._text(place, await body(request, FilePath)), media_type="text/plain")

    async def _text(self, place: WorldInstance, wanted: FilePath) -> str:
        most = min(wanted.max_content_size, _FILE_BYTES)
        return (await place.sandbox.read(wanted.path, max_bytes=most)).decode("utf-8", "replace")

    async def execute(self, request: Request, place: WorldInstance) -> Response:
        wanted = await body(request, VerifierFunction)
        done = await run_check(self._places.checks, check_code(place, wanted), place.databases)
        if done.score is None:
            return JSONResponse({"success": False, "result": None, "error": done.error, "message": done.stdout})
        return JSONResponse({"success": True, "result": done.result, "error": None, "message": done.stdout})

    async def serve_instance(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tools and pages, for who has a key."""
        instance_id: str = scope["path_params"]["id"]

        async def check(place: WorldInstance) -> None:
            await self._guard.uses(HTTPConnection(scope), place.id, place.owner)

        await self._forward(scope, receive, send, f"/i/{instance_id}", check)

    async def pages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pages alone, for who has the URL: a browser sends no key."""
        token, instance_id = scope["path_params"]["token"], scope["path_params"]["id"]
        prefix = f"/p/{token}/{instance_id}"

        async def check(place: WorldInstance) -> None:
            self._guard.opens(token, place.id)
            path = unquote(_inner_path(scope, prefix).partition(b"?")[0].decode("latin-1"))
            if posixpath.normpath("/" + path.lstrip("/")).startswith(("/mcp", "/api/v1")):
                raise FleetRefusal(404, "there is no such page")

        await self._forward(scope, receive, send, prefix, check)

    async def _forward(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        prefix: str,
        check: Callable[[WorldInstance], Awaitable[None]],
    ) -> None:
        """To the world's own server, with nothing of the caller's key."""
        if scope["type"] == "websocket":
            await receive()
        try:
            place = await self._places.find(scope["path_params"]["id"])
            await check(place)
            async with asyncio.timeout(_DIAL_S):
                stream = await place.sandbox.dial(place.world.port)
        except (FleetRefusal, Error) as error:
            return await _send(refuse(error), scope, receive, send)
        except (OSError, TimeoutError):
            return await _send(refuse(FleetRefusal(502, "the instance's server does not answer")), scope, receive, send)
        outside: str = scope.get("root_path") or prefix  # where this app is mounted counts for cookies and links
        target = Target(port=place.world.port, path=_inner_path(scope, prefix), prefix=outside.encode())
        try:
            passing = forward_http if scope["type"] == "http" else forward_ws
            return await passing(scope, receive, send, stream, target, self._limits)
        except (PlaneError, SandboxError, OSError, TimeoutError) as error:
            return await _send(
                refuse(FleetRefusal(502, f"the instance's server broke off: {error}")), scope, receive, send
            )
        finally:
            await stream.aclose()


def check_code(place: WorldInstance, wanted: VerifierFunction) -> VerifierCode:
    return VerifierCode(
        code=wanted.function_code,
        function=wanted.function_name,
        final_answer=wanted.text_solution,
        env_key=place.world.key,
        instance_id=place.id,
    )


def _mode(database: str) -> str:
    """The seed is what verifiers compare with: it is never written to."""
    return "ro" if database == "seed" else "rw"


def _inner_path(scope: Scope, prefix: str) -> bytes:
    """The path below `prefix`, percent signs and query and all."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].partition(prefix.encode())[2] or b"/"
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


async def _send(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})
