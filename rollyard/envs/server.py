"""`EnvServer`: environments over HTTP and WebSocket on one port, as an ASGI application.

Two faces. Infrastructure's: `/reset`, `/step`, `/state`, `/sessions`, `/ws`, under the server's key. The agent's: `/mcp` and
nothing else, under the key of its own session. Agent keys exist only where the server has a key: without one there is no
boundary for them to stand behind. A request to `/reset`, `/step` or `/state` with the header `x-session-id` is about that
session; without it, as in OpenEnv, an environment is made for the request alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from hmac import compare_digest
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from rollyard.core.errors import ConfigError
from rollyard.envs import openenv
from rollyard.envs.env import Env
from rollyard.envs.frames import SUBPROTOCOL, Connection
from rollyard.envs.session import Refused, Session
from rollyard.envs.sessions import EnvLimits, Sessions

STATUS = {"VALIDATION_ERROR": 422, "INVALID_JSON": 400, "SESSION_ERROR": 404, "CAPACITY_REACHED": 503, "DEADLINE": 504}
_BODY = 100 * 2**20


class EnvServer:
    """`production=True` serves only tools: no reset, step or state for anybody."""

    def __init__(
        self,
        make: Callable[[], Env],
        *,
        name: str | None = None,
        limits: EnvLimits | None = None,
        key: str | None = None,
        production: bool = False,
    ) -> None:
        self.kind: Any = make
        self.name = name or getattr(make, "__name__", "env")
        if key == "":
            raise ConfigError("the server's key is empty")
        self._key = key
        self._sessions = Sessions(make, limits or EnvLimits(), gym=not production)
        self._app = Starlette(routes=self._routes(production), lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        session = self._agent_of(scope)
        if session is not None:
            await self._to_agent(session, scope, receive, send)
        elif self._admitted(scope):
            await self._app(scope, receive, send)
        else:
            await _refuse(401, "a key is needed", scope, receive, send)

    def _agent_of(self, scope: Scope) -> Session | None:
        return self._sessions.of_agent(_bearer(scope)) if self._key is not None else None

    def _admitted(self, scope: Scope) -> bool:
        if self._key is None or (scope["type"] == "http" and _path(scope) == "/health"):
            return True
        return compare_digest(_bearer(scope).encode(), self._key.encode())

    async def _to_agent(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) != "/mcp":
            await _refuse(403, "this key is for /mcp", scope, receive, send)
            return
        session.used()
        scope.setdefault("state", {})["rollout_id"] = session.id
        await session.toolset(scope, receive, send)

    def _routes(self, production: bool) -> list[Route | WebSocketRoute]:
        gym = [
            Route("/reset", _plainly(self._reset), methods=["POST"]),
            Route("/step", _plainly(self._step), methods=["POST"]),
            Route("/state", _plainly(self._state), methods=["GET", "POST"]),
        ]
        return [
            Route("/health", _plainly(self._health), methods=["GET"]),
            Route("/metadata", _plainly(self._metadata), methods=["GET"]),
            Route("/schema", _plainly(self._schema), methods=["GET"]),
            Route("/openapi.json", _plainly(self._openapi), methods=["GET"]),
            Route("/list_environments", _plainly(self._names), methods=["GET"]),
            Route("/sessions", _plainly(self._listed), methods=["GET"]),
            Route("/sessions", _plainly(self._opened), methods=["POST"]),
            Route("/sessions/{id}", _plainly(self._ended), methods=["DELETE"]),
            Route("/mcp", _plainly(self._mcp), methods=["POST"]),
            WebSocketRoute("/ws", self._socket),
            *([] if production else gym),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self._sessions:
            yield

    async def _socket(self, socket: WebSocket) -> None:
        if SUBPROTOCOL in socket.scope.get("subprotocols", ()):
            await Connection(socket, self._sessions, agent_keys=self._key is not None).serve()
        else:
            await openenv.serve_socket(socket, self._sessions)

    async def _health(self, request: Request) -> Any:
        sessions = self._sessions
        return {
            "status": "healthy",
            "sessions": len(sessions.active),
            "capacity": sessions.limits.capacity,
            "waiting": sessions.waiting,
            "opened": sessions.opened,
        }

    async def _metadata(self, request: Request) -> Any:
        told = dict.fromkeys(("readme_content", "version", "author", "documentation_url"))
        return {"name": self.name, "description": (self.kind.__doc__ or self.name).strip(), **told}

    async def _schema(self, request: Request) -> Any:
        state = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}}
        action, observation = (getattr(self.kind, n, dict[str, Any]) for n in ("action", "observation"))
        return {
            "action": msgspec.json.schema(action),
            "observation": msgspec.json.schema(observation),
            "state": {"type": "object", "properties": state, "additionalProperties": True},
        }

    async def _openapi(self, request: Request) -> Any:
        """Which routes there are; `openenv validate` tells the mode by it."""
        paths: dict[str, dict[str, Any]] = {}
        for route in self._app.routes:
            if isinstance(route, Route):
                answers = {m.lower(): {"responses": {"200": {"description": "OK"}}} for m in route.methods or ()}
                paths.setdefault(route.path, {}).update(answers)
        return {"openapi": "3.1.0", "info": {"title": self.name, "version": version("rollyard")}, "paths": paths}

    async def _names(self, request: Request) -> Any:
        return [self.name]

    async def _listed(self, request: Request) -> Any:
        return [{"session": s.id, "live": s.live, "lease_s": s.lease_s} for s in self._sessions.active]

    async def _opened(self, request: Request) -> Any:
        asked = await _body(request)
        numbers = {k: _number(asked, k) for k in ("lease_s", "deadline_s")}
        session = await self._sessions.open(**numbers, queue_s=_number(asked, "queue_s") or 0.0)
        told = {"session": session.id, "lease_s": session.lease_s, "deadline_s": session.deadline_s}
        return told | ({"agent_key": session.agent_key} if self._key is not None else {})

    async def _ended(self, request: Request) -> Any:
        await self._sessions.close(self._sessions.get(request.path_params["id"]))
        return {}

    async def _reset(self, request: Request) -> Any:
        body = await _body(request)
        async with self._about(request) as session:
            return await openenv.reset(session, body)

    async def _step(self, request: Request) -> Any:
        action = (await _body(request)).get("action")
        if not isinstance(action, dict):
            raise Refused("VALIDATION_ERROR", "action must be an object")
        async with self._about(request) as session:
            return await openenv.step(session, action)

    async def _state(self, request: Request) -> Any:
        async with self._about(request) as session:
            return await session.do("state", {})

    @asynccontextmanager
    async def _about(self, request: Request) -> AsyncGenerator[Session]:
        """The session that the request names, or one for this request alone."""
        named = request.headers.get("x-session-id")
        if named is not None:
            yield self._sessions.get(named)
            return
        session = await self._sessions.open()
        try:
            yield session
        finally:
            await self._sessions.close(session)

    async def _mcp(self, request: Request) -> Any:
        """OpenEnv's JSON-RPC: tools of a session, and sessions to share with `/ws?session_id=`."""
        body = await _body(request)
        params: Any = body.get("params")
        named = params.get("session_id") if isinstance(params, dict) else None
        try:
            if body.get("method") == "openenv/session/create":
                return openenv.rpc_result(body, {"session_id": (await self._sessions.open()).id})
            if body.get("method") == "openenv/session/close":
                return openenv.rpc_result(body, await self._rpc_close(str(named)))
            if named is not None:
                return await openenv.rpc(self._sessions.get(str(named)), body)
            async with self._about(request) as session:
                return await openenv.rpc(session, body)
        except Refused as error:
            return openenv.rpc_error(body, error)

    async def _rpc_close(self, session_id: str) -> dict[str, Any]:
        session = self._sessions.get(session_id)
        if session.attached:
            session.lease_s = 0.0  # it ends when its socket does
            return {"session_id": session_id, "closed": False, "closing": True}
        await self._sessions.close(session)
        return {"session_id": session_id, "closed": True}


def _plainly(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A route's value as JSON, its refusal as a status."""

    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await answer(request))
        except Refused as error:
            told = {"detail": error.message, "code": error.code}
            return JSONResponse(told, status_code=STATUS.get(error.code, 500))

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    whole = bytearray()
    async for part in request.stream():
        whole += part
        if len(whole) > _BODY:
            raise Refused("VALIDATION_ERROR", "the body is too large")
    if not whole:
        return {}
    try:
        body = msgspec.json.decode(whole)
    except msgspec.DecodeError as error:
        raise Refused("INVALID_JSON", f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("VALIDATION_ERROR", "the body must be an object")
    return body


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise Refused("VALIDATION_ERROR", f"{name} must be a number of at least 0")
    return float(value)


def _path(scope: Scope) -> str:
    """Below whatever the application is mounted at."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return value.decode("latin-1").removeprefix("Bearer ").strip()
    return ""


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": why})  # before accept: the handshake gets 403
        return
    await JSONResponse({"detail": why}, status_code=status)(scope, receive, send)
