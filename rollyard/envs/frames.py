"""Our own frames, on the same `/ws` when a client offers the subprotocol `rollyard.v1`.

    client  {"id": "1", "do": "open", "with": {"lease_s", "deadline_s", "queue_s"}}      a new session, or
            {"id": "1", "do": "open", "with": {"session", "lease"}}                      the one that lost its socket
            {"id": "2", "do": "reset" | "step" | "state" | "tools" | "call" | "cancel" | "close", "with": {...}}
    server  {"id": "2", "ok": value} or {"id": "2", "error": {"code", "message"}}, in any order
            {"event": "heartbeat", "waiting": n} every few seconds, also while a client waits in line

A socket that is lost leaves the session for its lease; sending a request again under its id never runs it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hmac import compare_digest
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from rollyard.envs.session import Refused, Session
from rollyard.envs.sessions import Sessions

SUBPROTOCOL = "rollyard.v1"
_IN_FLIGHT = 64  # requests of one connection


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    do: str
    given: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="with")


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: str | None = None
    lease: str | None = None
    lease_s: float | None = None
    deadline_s: float | None = None
    queue_s: float = 0.0


class Connection:
    def __init__(self, socket: WebSocket, sessions: Sessions, *, agent_keys: bool) -> None:
        self._socket = socket
        self._sessions = sessions
        self._agent_keys = agent_keys
        self._session: Session | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        await self._socket.accept(subprotocol=SUBPROTOCOL)
        beat = asyncio.get_running_loop().create_task(self._beat())
        try:
            while True:
                text = await self._socket.receive_text()
                if len(self._tasks) >= _IN_FLIGHT:
                    await self._send({"error": {"code": "VALIDATION_ERROR", "message": "too many requests at once"}})
                    continue
                task = asyncio.get_running_loop().create_task(self._one(text))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (WebSocketDisconnect, RuntimeError, KeyError):
            pass  # gone, or a binary frame (KeyError), which no client of ours sends
        finally:
            beat.cancel()
            for task in self._tasks:
                task.cancel()
            if self._session is not None:
                self._session.attached -= 1
                self._session.used()

    async def _one(self, text: str) -> None:
        try:
            frame = msgspec.json.decode(text, type=Frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            await self._send({"error": {"code": "INVALID_JSON", "message": str(error)}})
            return
        try:
            await self._send({"id": frame.id, "ok": await self._do(frame)})
        except Refused as error:
            await self._send({"id": frame.id, "error": {"code": error.code, "message": error.message}})

    async def _do(self, frame: Frame) -> Any:
        if frame.do == "open":
            return await self._open(frame.given)
        session = self._session
        if session is None:
            raise Refused("SESSION_ERROR", "open a session first")
        if frame.do == "cancel":
            return {"cancelled": session.cancel()}
        if frame.do == "close":
            self._session = None
            await self._sessions.close(session)
            return {}
        return await session.do(frame.do, frame.given, request_id=frame.id)

    async def _open(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            asked = msgspec.convert(given, Opening)
        except msgspec.ValidationError as error:
            raise Refused("VALIDATION_ERROR", str(error)) from error
        if self._session is not None:
            raise Refused("SESSION_ERROR", "this connection has a session")
        if asked.session is None:
            session = await self._sessions.open(
                lease_s=asked.lease_s, deadline_s=asked.deadline_s, queue_s=asked.queue_s
            )
        else:
            session = self._sessions.get(asked.session)
            if not compare_digest(session.lease, asked.lease or ""):
                raise Refused("SESSION_ERROR", "there is no such session")
        session.attached += 1
        self._session = session
        told = {"session": session.id, "lease": session.lease, "lease_s": session.lease_s}
        told["deadline_s"] = session.deadline_s
        return told | ({"agent_key": session.agent_key} if self._agent_keys else {})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._sessions.limits.heartbeat_s)
            await self._send({"event": "heartbeat", "waiting": self._sessions.waiting})

    async def _send(self, value: dict[str, Any]) -> None:
        try:
            await self._socket.send_text(msgspec.json.encode(value).decode())
        except (WebSocketDisconnect, RuntimeError):
            return  # gone: the session keeps the answer for a reattach
