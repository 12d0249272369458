"""`EnvServer`: environments over HTTP and WebSocket on one port, as an ASGI application.

Two APIs. Infrastructure's: `/reset`, `/step`, `/state`, `/sessions`, `/ws` and all the rest, under the server's key. The
agent's: `/mcp` and nothing else, under the key of its own session. Agent keys exist only where the server has a key: without
one there is no boundary for them to stand behind. A request to `/reset`, `/step` or `/state` with the header `x-session-id`
is about that session; without it, as in OpenEnv, an environment is made for the request alone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hmac import compare_digest
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollyard.core.errors import ConfigError
from rollyard.envs import openenv
from rollyard.envs.bodies import RequestBody, json_response, number, object_of, refusal
from rollyard.envs.env import Env
from rollyard.envs.journal import SessionJournal
from rollyard.envs.mcp_endpoint import McpEndpoint, to_tools
from rollyard.envs.metrics import env_metrics
from rollyard.envs.openapi import STATE, document
from rollyard.envs.protocol import SUBPROTOCOL, EnvConnection
from rollyard.envs.results import EnvRefused
from rollyard.envs.session import EnvSession
from rollyard.envs.sessions import EnvLimits, Sessions
from rollyard.envs.sockets import AsgiPeer, WebSocketPeer
from rollyard.envs.task_api import Splits, TaskApi
from rollyard.net.metrics import write_metrics
from rollyard.net.websocket_server import EXTENSION

_TASK_VERBS = ("tasks", "num_tasks", "task", "task_range")


class EnvServer:
    """`production=True` serves only tools: no reset, step or state for any caller. `splits` are the tasks clients may look
    through, where they are not the class's own. `keep` is a folder in which sessions survive the server's death;
    leases run out by `clock`."""

    def __init__(
        self,
        make: Callable[[], Env],
        *,
        name: str | None = None,
        limits: EnvLimits | None = None,
        key: str | None = None,
        production: bool = False,
        splits: Splits | None = None,
        keep: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind: Any = make
        self.name = name or getattr(make, "__name__", "env")
        if key == "":
            raise ConfigError(
                "the server's key is empty", hint="put a key into the key file, or remove the file to get a new one"
            )
        self._key = key
        self._production = production
        limits = limits or EnvLimits()
        most: int | None = getattr(make, "max_sessions", None)
        self._sessions = Sessions(
            make,
            limits if most is None else replace(limits, capacity=min(most, limits.capacity)),
            name=self.name,
            gym=not production,
            journal=SessionJournal(keep) if keep is not None else None,
            clock=clock,
        )
        self._tasks = TaskApi(self.name, splits if splits is not None else getattr(make, "splits", {}))
        self._mcp = McpEndpoint(self._sessions)
        self._app = Starlette(routes=self._routes(), lifespan=self._lifespan)

    @property
    def open_to_all(self) -> bool:
        """Whether it asks for no key."""
        return self._key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        bearer = _bearer(scope)
        if self._key is None or compare_digest(bearer.encode(), self._key.encode()):
            await self._admit(scope, receive, send)
        elif (session := await self._agent_of(bearer)) is not None:
            await self._to_agent(session, scope, receive, send)
        elif scope["type"] == "http" and _path(scope) == "/health":
            await self._app(scope, receive, send)
        else:
            await _refuse(401, "a key is needed", scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        elif _path(scope) == "/mcp":
            await self._mcp(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _agent_of(self, bearer: str) -> EnvSession | None:
        try:
            return await self._sessions.of_agent(bearer)
        except EnvRefused:
            return None  # its session cannot be put back, or not now

    async def _to_agent(self, session: EnvSession, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) != "/mcp":
            await _refuse(403, "this key is for /mcp", scope, receive, send)
            return
        await to_tools(self._sessions, session, scope, receive, send)

    def _routes(self) -> list[Route]:
        gym = [
            Route("/reset", _json_endpoint(self._reset), methods=["POST"]),
            Route("/step", _json_endpoint(self._step), methods=["POST"]),
            Route("/state", _json_endpoint(self._state), methods=["GET", "POST"]),
        ]
        return [
            Route("/health", _json_endpoint(self._health), methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/metadata", _json_endpoint(self._metadata), methods=["GET"]),
            Route("/schema", _json_endpoint(self._schema), methods=["GET"]),
            Route("/openapi.json", _json_endpoint(self._openapi), methods=["GET"]),
            Route("/list_environments", _json_endpoint(self._names), methods=["GET"]),
            Route("/sessions", _json_endpoint(self._list), methods=["GET"]),
            Route("/sessions", _json_endpoint(self._open), methods=["POST"]),
            Route("/sessions/{id}", _json_endpoint(self._end), methods=["DELETE"]),
            Route("/sessions/{id}/cancel", _json_endpoint(self._cancel), methods=["POST"]),
            *([] if self._production else gym),
            Route("/{env}/splits", _json_endpoint(self._splits), methods=["GET"]),
            *(Route(f"/{{env}}/{verb}", _json_endpoint(self._task_verb), methods=["POST"]) for verb in _TASK_VERBS),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self._sessions:
            yield

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer: WebSocketPeer = scope.get("extensions", {}).get(EXTENSION) or AsgiPeer(scope, receive, send)
        path = _path(scope)
        if path == "/mcp":
            await openenv.serve_rpc_socket(peer, self._sessions)
        elif path != "/ws":
            await _refuse(404, "there is no such socket", scope, receive, send)
        elif SUBPROTOCOL in peer.subprotocols:
            await EnvConnection(peer, self._sessions, agent_keys=self._key is not None).serve()
        else:
            await openenv.serve_socket(peer, self._sessions)

    async def _health(self, request: Request) -> Any:
        sessions = self._sessions
        return {
            "status": "healthy",
            "sessions": len(sessions.active),
            "capacity": sessions.limits.capacity,
            "waiting": sessions.waiting,
            "opened": sessions.counters.sessions["opened"],
        }

    async def _metrics(self, request: Request) -> Response:
        return Response(write_metrics(env_metrics(self._sessions)), media_type="text/plain; version=0.0.4")

    async def _metadata(self, request: Request) -> Any:
        metadata = dict.fromkeys(("readme_content", "version", "author", "documentation_url"))
        return {"name": self.name, "description": (self.kind.__doc__ or self.name).strip(), **metadata}

    async def _schema(self, request: Request) -> Any:
        action, observation = (getattr(self.kind, n, dict[str, Any]) for n in ("action", "observation"))
        made = {"action": msgspec.json.schema(action), "observation": msgspec.json.schema(observation), "state": STATE}
        return made | dict(getattr(self.kind, "schemas", {}))

    async def _openapi(self, request: Request) -> Any:
        keyed = self._key is not None
        return document(name=self.name, version=version("rollyard"), production=self._production, keyed=keyed)

    async def _names(self, request: Request) -> Any:
        return [self.name]

    async def _splits(self, request: Request) -> Any:
        return self._tasks.list_tasks(request.path_params["env"])

    async def _task_verb(self, request: Request) -> Any:
        verb = request.url.path.rpartition("/")[2]
        return self._tasks.answer(request.path_params["env"], verb, await _body(request))

    async def _list(self, request: Request) -> Any:
        return [{"session": s.id, "live": s.live, "lease_s": s.lease_s} for s in self._sessions.active]

    async def _open(self, request: Request) -> Any:
        body = await _body(request)
        numbers = {k: number(body, k) for k in ("lease_s", "deadline_s")}
        session = await self._sessions.open(**numbers, queue_s=number(body, "queue_s") or 0.0)
        answer = {"session": session.id, "lease_s": session.lease_s, "deadline_s": session.deadline_s}
        return answer | ({"agent_key": session.agent_key} if self._key is not None else {})

    async def _end(self, request: Request) -> Any:
        await self._sessions.close(await self._sessions.find(request.path_params["id"]))
        return {}

    async def _cancel(self, request: Request) -> Any:
        return {"cancelled": (await self._sessions.find(request.path_params["id"])).cancel()}

    async def _reset(self, request: Request) -> Any:
        body = await _body(request)
        async with self._enter_session(request) as session:
            return await openenv.reset(session, body)

    async def _step(self, request: Request) -> Any:
        action = (await _body(request)).get("action")
        if not isinstance(action, dict):
            raise EnvRefused("VALIDATION_ERROR", "action must be an object")
        async with self._enter_session(request) as session:
            return await openenv.step(session, action)

    async def _state(self, request: Request) -> Any:
        async with self._enter_session(request) as session:
            return await session.do("state", {})

    @asynccontextmanager
    async def _enter_session(self, request: Request) -> AsyncGenerator[EnvSession]:
        """The session that the request names, or one for this request alone."""
        named = request.headers.get("x-session-id")
        if named is not None:
            yield await self._sessions.find(named)
            return
        session = await self._sessions.open()
        try:
            yield session
        finally:
            await self._sessions.close(session)


def _json_endpoint(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """A route's value as JSON, its refusal as a status."""

    async def endpoint(request: Request) -> Response:
        try:
            return json_response(await answer(request))
        except EnvRefused as error:
            return refusal(error)

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    return object_of(await RequestBody(request.receive).read_all())


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
