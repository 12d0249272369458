"""OpenEnv's wire, as its own client and servers speak it: frames on `/ws`, bodies of `/reset` and `/step`, methods of `/mcp`.

It has no request ids: answers come in the order of requests, and a frame with one key too many is refused by their servers.
It knows one `done` and no `info`, so `truncated` and info travel in `metadata`. Two things of theirs are not kept: a frame
that is no object is refused without ending the session, and production mode has no reset, step or state on the socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from rollyard.envs.session import Refused, Session
from rollyard.envs.sessions import Sessions

RPC_CODES = {"VALIDATION_ERROR": -32602, "UNKNOWN_TYPE": -32601, "INVALID_JSON": -32700}


async def serve_socket(socket: WebSocket, sessions: Sessions) -> None:
    """One connection: a session of its own, which ends with it, or the one that `?session_id=` names."""
    await socket.accept()
    try:
        session, own = await _session(socket, sessions)
    except Refused as error:
        more = {"active_sessions": len(sessions.active), "max_sessions": sessions.limits.capacity}
        await socket.send_text(_error(error, more if error.code == "CAPACITY_REACHED" else {}))
        await socket.close(1000)
        return
    try:
        while (text := await _received(socket)) is not None:
            answer = await _answer(session, text)
            if answer is None:
                break
            await socket.send_text(answer)
        await socket.close(1000)
    except (WebSocketDisconnect, RuntimeError):
        pass  # the peer left: RuntimeError is how Starlette names a send after that
    finally:
        session.attached -= 1
        session.used()
        if own:
            await sessions.close(session)


async def _session(socket: WebSocket, sessions: Sessions) -> tuple[Session, bool]:
    asked = socket.query_params.get("session_id")
    session = await sessions.open() if asked is None else sessions.get(asked)
    if session.attached:
        raise Refused("SESSION_ERROR", "the session has a connection already")
    session.attached += 1
    return session, asked is None


async def _received(socket: WebSocket) -> str | None:
    try:
        message = await socket.receive()
    except RuntimeError:
        return None
    if message["type"] == "websocket.disconnect":
        return None
    text = message.get("text")
    return text if text is not None else (message.get("bytes") or b"").decode(errors="replace")


async def _answer(session: Session, text: str) -> str | None:
    """The frame to send back; None ends the connection."""
    try:
        frame = _object(text)
        kind, given = frame.get("type"), frame.get("data") or {}
        if extra := sorted(set(frame) - {"type", "data"}):
            raise Refused("VALIDATION_ERROR", f"unknown keys: {', '.join(extra)}")
        if not isinstance(given, dict):
            raise Refused("VALIDATION_ERROR", "data must be an object")
        if kind == "close":
            return None
        if kind == "reset":
            return _frame("observation", await reset(session, given))
        if kind == "step":
            return _frame("observation", await step(session, given))
        if kind == "state":
            return _frame("state", await session.do("state", {}))
        if kind == "mcp":
            return _frame("mcp", await rpc(session, given))
        raise Refused("UNKNOWN_TYPE", f"unknown message type: {kind!r}")
    except Refused as error:
        return _error(error, {})


async def reset(session: Session, given: Mapping[str, Any]) -> dict[str, Any]:
    known = {k: given[k] for k in ("seed", "episode_id") if k in given}
    options = {k: v for k, v in given.items() if k not in known}
    return observed(await session.do("reset", known | {"options": options}))


async def step(session: Session, action: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call is a step there."""
    if action.get("type") not in ("list_tools", "call_tool") or not session.toolset.tools:
        return observed(await session.do("step", {"action": dict(action)}))
    await session.do("state", {})  # production has no steps of any kind
    if action["type"] == "list_tools":
        return observed({"observation": {"tools": await session.do("tools", {})}})
    name = action.get("tool_name")
    answer = await session.do("call", {"name": name, "arguments": action.get("arguments")})
    if answer["failed"]:
        kind = "execution_error" if answer["known"] else "tool_not_found"
        error = {"error_type": kind, "message": str(answer["value"])}
        return observed({"observation": {"tool_name": name, "result": None, "error": error}})
    return observed({"observation": {"tool_name": name, "result": tool_result(answer), "error": None}})


def observed(result: Mapping[str, Any]) -> dict[str, Any]:
    """Our step result as theirs: metadata inside the observation and beside it, reward and done beside it only."""
    seen = result["observation"]
    observation = dict(seen) if isinstance(seen, dict) else {"value": seen}
    metadata = dict(result.get("info") or {})
    if result.get("truncated"):
        metadata["truncated"] = True
    done = bool(result.get("terminated") or result.get("truncated"))
    told = {"observation": observation | {"metadata": metadata}, "reward": result.get("reward"), "done": done}
    return told | ({"metadata": metadata} if metadata else {})


def tool_result(answer: Mapping[str, Any]) -> dict[str, Any]:
    value = answer["value"]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return {
        "content": [{"type": "text", "text": text, "annotations": None, "meta": None}],
        "structured_content": value if isinstance(value, dict) else {"result": value},
        "meta": None,
        "data": value,
        "is_error": bool(answer["failed"]),
    }


async def rpc(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    """`tools/list` and `tools/call` as JSON-RPC."""
    params = request.get("params") or {}
    try:
        if not isinstance(params, dict):
            raise Refused("VALIDATION_ERROR", "params must be an object")
        method = request.get("method")
        if method == "tools/list":
            listed = await session.do("tools", {})
            tools = [{**t, "inputSchema": t["input_schema"]} for t in listed]
            return rpc_result(request, {"tools": tools})
        if method == "tools/call":
            answer = await session.do("call", {"name": params.get("name"), "arguments": params.get("arguments")})
            return rpc_result(request, tool_result(answer))
        raise Refused("UNKNOWN_TYPE", f"there is no method {method!r}")
    except Refused as error:
        return rpc_error(request, error)


def rpc_result(request: Mapping[str, Any], result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request.get("id"), "result": result}


def rpc_error(request: Mapping[str, Any], error: Refused) -> dict[str, Any]:
    told = {"code": RPC_CODES.get(error.code, -32000), "message": error.message, "data": {"code": error.code}}
    return {"jsonrpc": "2.0", "id": request.get("id"), "error": told}


def _object(text: str) -> dict[str, Any]:
    try:
        frame = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Refused("INVALID_JSON", f"not JSON: {error}") from error
    if not isinstance(frame, dict):
        raise Refused("VALIDATION_ERROR", "a frame is an object")
    return frame


def _frame(kind: str, data: Any) -> str:
    return msgspec.json.encode({"type": kind, "data": data}).decode()


def _error(error: Refused, more: Mapping[str, Any]) -> str:
    return _frame("error", {"message": error.message, "code": error.code, **more})
