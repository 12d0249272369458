"""OpenEnv's wire, as its own client and servers speak it: frames on `/ws`, bodies of `/reset` and `/step`, methods of `/mcp`.

It has no request ids: answers come in the order of requests, and a frame with one key too many is refused by their servers.
It knows one `done` and no `info`, so `truncated` and info travel in `metadata`. Two things of theirs are not kept: a frame
that is no object is refused without ending the session, and production mode has no reset, step or state on the socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.envs.results import EnvRefused
from rollyard.envs.session import EnvSession
from rollyard.envs.sessions import Sessions
from rollyard.envs.sockets import WebSocketPeer

RPC_CODES = {
    "VALIDATION_ERROR": -32602,
    "UNKNOWN_TYPE": -32601,
    "INVALID_JSON": -32700,
    "TOOL_FAILED": -32603,
    "TOOL_NOT_FOUND": -32603,
}


async def serve_socket(peer: WebSocketPeer, sessions: Sessions) -> None:
    """One connection to `/ws`: a session of its own, which ends with it, or the one that `?session_id=` names."""
    await peer.accept()
    try:
        session, own = await _session(peer, sessions)
    except EnvRefused as error:
        more = {"active_sessions": len(sessions.active), "max_sessions": sessions.limits.capacity}
        peer.send(_error(error, more if error.code == "CAPACITY_REACHED" else {}))
        await peer.close()
        return
    try:
        while (text := await peer.receive()) is not None and (answer := await _answer(session, text)) is not None:
            peer.send(answer)
        await peer.close()
    finally:
        sessions.detach(session)
        if own:
            await sessions.close(session)


async def serve_rpc_socket(peer: WebSocketPeer, sessions: Sessions) -> None:
    """One connection to `/mcp`: bare JSON-RPC frames about an environment of its own."""
    await peer.accept()
    try:
        session = await sessions.open()
    except EnvRefused as error:
        peer.send(msgspec.json.encode(rpc_error({}, error)))
        await peer.close()
        return
    sessions.attach(session)
    try:
        while (text := await peer.receive()) is not None:
            try:
                answer = await rpc(session, _object(text))
            except EnvRefused as error:
                answer = rpc_error({}, error)
            peer.send(msgspec.json.encode(answer))
    finally:
        sessions.detach(session)
        await sessions.close(session)


async def _session(peer: WebSocketPeer, sessions: Sessions) -> tuple[EnvSession, bool]:
    session_id = peer.query("session_id")
    session = await sessions.open() if session_id is None else await sessions.find(session_id)
    if session.attached:
        raise EnvRefused("SESSION_ERROR", "the session has a connection already")
    sessions.attach(session)
    return session, session_id is None


async def _answer(session: EnvSession, text: str | bytes) -> bytes | None:
    """The frame to send back; None ends the connection."""
    try:
        frame = _object(text)
        kind, given = frame.get("type"), {} if frame.get("data") is None else frame["data"]
        if extra := sorted(set(frame) - {"type", "data"}):
            raise EnvRefused("VALIDATION_ERROR", f"unknown keys: {', '.join(extra)}")
        if not isinstance(given, dict):
            raise EnvRefused("VALIDATION_ERROR", "data must be an object")
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
        raise EnvRefused("UNKNOWN_TYPE", f"unknown message type: {str(kind)[:40]!r}")
    except EnvRefused as error:
        return _error(error, {})


async def reset(session: EnvSession, given: Mapping[str, Any]) -> dict[str, Any]:
    known = {k: given[k] for k in ("seed", "episode_id") if k in given}
    options = {k: v for k, v in given.items() if k not in known}
    return to_observation(await session.do("reset", known | {"options": options}))


async def step(session: EnvSession, action: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call is a step there. An environment of theirs takes it as one, with the reward it gives for it."""
    called = action.get("type") in ("list_tools", "call_tool") and session.toolset.tools
    if not called or session.steps_tools:
        return to_observation(await session.do("step", {"action": dict(action)}))
    await session.do("state", {})  # production has no steps of any kind
    if action["type"] == "list_tools":
        return to_observation({"observation": {"tools": await session.do("tools", {})}})
    name = action.get("tool_name")
    answer = await session.do("call", {"name": name, "arguments": action.get("arguments"), "counts": True})
    if answer["failed"]:
        kind = "execution_error" if answer["known"] else "tool_not_found"
        error = {"error_type": kind, "message": str(answer["value"])}
        return to_observation({"observation": {"tool_name": name, "result": None, "error": error}})
    return to_observation({"observation": {"tool_name": name, "result": tool_result(answer), "error": None}})


def to_observation(result: Mapping[str, Any]) -> dict[str, Any]:
    """Our step result as theirs: metadata inside the observation and beside it, reward and done beside it only. What an
    observation says in `metadata` of its own stands before info of the same name."""
    seen = result["observation"]
    observation = dict(seen) if isinstance(seen, dict) else {"value": seen}
    own = observation.get("metadata")
    metadata = dict(result.get("info") or {}) | (own if isinstance(own, dict) else {})
    if result.get("truncated"):
        metadata["truncated"] = True
    done = bool(result.get("terminated") or result.get("truncated"))
    if own is None or isinstance(own, dict):
        observation["metadata"] = metadata
    answer = {"observation": observation, "reward": result.get("reward"), "done": done}
    return answer | ({"metadata": metadata} if metadata else {})


def tool_result(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call that went well: a failure is an error on every path."""
    value = answer["value"]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return {
        "content": [{"type": "text", "text": text, "annotations": None, "meta": None}],
        "structured_content": value if isinstance(value, dict) else {"result": value},
        "meta": None,
        "data": value,
        "is_error": False,
        "isError": False,
    }


async def rpc(session: EnvSession, request: Mapping[str, Any]) -> dict[str, Any]:
    """`tools/list` and `tools/call` as JSON-RPC."""
    params = request.get("params") or {}
    try:
        if not isinstance(params, dict):
            raise EnvRefused("VALIDATION_ERROR", "params must be an object")
        method = request.get("method")
        if method == "tools/list":
            listed = await session.do("tools", {})
            tools = [{**t, "inputSchema": t["input_schema"]} for t in listed]
            return rpc_result(request, {"tools": tools})
        if method == "tools/call":
            answer = await session.do("call", {"name": params.get("name"), "arguments": params.get("arguments")})
            if answer["failed"]:  # their clients raise on an error alone, and take any result for a success
                code = "TOOL_FAILED" if answer["known"] else "TOOL_NOT_FOUND"
                raise EnvRefused(code, str(answer["value"]))
            return rpc_result(request, tool_result(answer))
        raise EnvRefused("UNKNOWN_TYPE", f"there is no method {method!r}")
    except EnvRefused as error:
        return rpc_error(request, error)


def rpc_result(request: Mapping[str, Any], result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request.get("id"), "result": result}


def rpc_error(request: Mapping[str, Any], error: EnvRefused) -> dict[str, Any]:
    fields = {"code": RPC_CODES.get(error.code, -32000), "message": error.message, "data": {"code": error.code}}
    return {"jsonrpc": "2.0", "id": request.get("id"), "error": fields}


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        frame = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise EnvRefused("INVALID_JSON", f"not JSON: {error}") from error
    if not isinstance(frame, dict):
        raise EnvRefused("VALIDATION_ERROR", "a frame is an object")
    return frame


def _frame(kind: str, data: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "data": data})


def _error(error: EnvRefused, more: Mapping[str, Any]) -> bytes:
    return _frame("error", {"message": error.message, "code": error.code, **more})
