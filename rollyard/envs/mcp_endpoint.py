"""`/mcp` as infrastructure sees it: OpenEnv's JSON-RPC and real MCP on one path.

OpenEnv's clients post `openenv/session/create`, then tool calls that name the session, or calls that name none and are each
about an environment of their own. A real MCP client begins with `initialize`: it gets an environment for its MCP session,
which ends with it (DELETE) or when its lease runs out. An agent never comes here: its key leads to its own session's tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rollyard.envs import openenv
from rollyard.envs.bodies import RequestBody, json_response, object_of, status_of
from rollyard.envs.results import EnvRefused
from rollyard.envs.session import EnvSession
from rollyard.envs.sessions import Sessions

_HEADER = b"mcp-session-id"


class McpEndpoint:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._by_mcp: dict[str, EnvSession] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "POST", "DELETE"):
            await Response(status_code=405, headers={"allow": "GET, POST, DELETE"})(scope, receive, send)
            return
        named = dict(scope["headers"]).get(_HEADER)
        if named is not None:
            await self._in_session(named.decode("latin-1"), scope, receive, send)
        elif scope["method"] != "POST":
            await json_response({"detail": "there is no MCP session"}, 400)(scope, receive, send)
        else:
            await self._post(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(receive)
        request: Mapping[str, Any] = {}
        try:
            request = object_of(await body.read_all())
            if request.get("method") == "initialize":
                await self._initialize(scope, body.replay, send)
                return
            answer = await self._rpc(request)
        except EnvRefused as error:
            status = status_of(error) if error.code == "CAPACITY_REACHED" else 200
            await json_response(openenv.rpc_error(request, error), status)(scope, receive, send)
            return
        await json_response(answer)(scope, receive, send)

    async def _rpc(self, request: Mapping[str, Any]) -> dict[str, Any]:
        params: Any = request.get("params")
        named = params.get("session_id") if isinstance(params, dict) else None
        method = request.get("method")
        if method == "openenv/session/create":
            return openenv.rpc_result(request, {"session_id": (await self._sessions.open()).id})
        if method == "openenv/session/close":
            return openenv.rpc_result(request, await self._close(str(named)))
        if method not in ("tools/list", "tools/call"):
            raise EnvRefused("UNKNOWN_TYPE", f"there is no method {str(method)[:40]!r}")
        if named is not None:
            return await openenv.rpc(await self._sessions.find(str(named)), request)
        session = await self._sessions.open()
        try:
            return await openenv.rpc(session, request)
        finally:
            await self._sessions.close(session)

    async def _close(self, session_id: str) -> dict[str, Any]:
        session = await self._sessions.find(session_id)
        if session.attached:
            session.lease_s = 0.0  # it ends when its socket does
            return {"session_id": session_id, "closed": False, "closing": True}
        await self._sessions.close(session)
        return {"session_id": session_id, "closed": True}

    async def _initialize(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._by_mcp = {name: kept for name, kept in self._by_mcp.items() if not kept.closed}
        session = await self._sessions.open()
        begun = False

        async def watch_and_send(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and message["status"] < 400:
                for name, value in message["headers"]:
                    if name.lower() == _HEADER:
                        self._by_mcp[value.decode("latin-1")] = session
                        begun = True
            await send(message)

        try:
            await to_tools(self._sessions, session, scope, receive, watch_and_send)
        finally:
            if not begun:
                await self._sessions.close(session)

    async def _in_session(self, named: str, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._by_mcp.get(named)
        if session is None or session.closed:
            self._by_mcp.pop(named, None)
            await json_response({"detail": "there is no such MCP session"}, 404)(scope, receive, send)
            return
        await to_tools(self._sessions, session, scope, receive, send)
        if scope["method"] == "DELETE":
            del self._by_mcp[named]
            await self._sessions.close(session)


async def to_tools(sessions: Sessions, session: EnvSession, scope: Scope, receive: Receive, send: Send) -> None:
    """A request for the tools of a session. While one is under way the session is in use; a stream that merely listens
    (GET) does not keep it."""
    session.touch()
    scope.setdefault("state", {})["rollout_id"] = session.id
    if scope["method"] == "GET":
        await session.toolset(scope, receive, send)
        return
    sessions.attach(session)
    try:
        await session.toolset(scope, receive, send)
    finally:
        sessions.detach(session)
