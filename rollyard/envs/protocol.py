"""Our own frames, on the same `/ws` when a client offers the subprotocol `rollyard.v1`.

    client  {"id": "1", "do": "open", "with": {"lease_s", "deadline_s", "queue_s"}}      a new session, or
            {"id": "1", "do": "open", "with": {"session", "lease"}}                      the one that lost its socket
            {"id": "2", "do": "reset" | "step" | "state" | "tools" | "call" | "cancel" | "close", "with": {...}}
    server  {"id": "2", "ok": value} or {"id": "2", "error": {"code", "message"}}, in any order
            {"event": "progress", "id": "2", "done", "total", "message"} before the answer of a move that takes long
            {"event": "heartbeat", "waiting": n} every few seconds, also while a client waits in line

A socket that is lost leaves the session for its lease; sending a request again under its id never runs it twice. Any request may
carry `"seen": [ids]`, the answers that have arrived: those need not be remembered any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from rollyard.envs.results import EnvRefused, EnvResult
from rollyard.envs.session import EnvSession
from rollyard.envs.sessions import Sessions
from rollyard.envs.sockets import WebSocketPeer

SUBPROTOCOL = "rollyard.v1"
_IN_FLIGHT = 64  # requests of one connection
_ID = 128


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    do: str
    given: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="with")
    seen: tuple[str, ...] = ()


class OpenFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: str | None = None
    lease: str | None = None
    lease_s: float | None = None
    deadline_s: float | None = None
    queue_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "deadline_s", "queue_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0")


class EnvConnection:
    def __init__(self, peer: WebSocketPeer, sessions: Sessions, *, agent_keys: bool) -> None:
        self._peer = peer
        self._sessions = sessions
        self._agent_keys = agent_keys
        self._session: EnvSession | None = None
        self._opening = False
        self._in_flight = 0
        self._decoder = msgspec.json.Decoder(Frame)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        await self._peer.accept(SUBPROTOCOL)
        beat = asyncio.get_running_loop().create_task(self._beat())
        try:
            await self._peer.for_each_message(self._receive)
        finally:
            beat.cancel()
            for task in self._tasks:
                task.cancel()
            if self._session is not None:
                self._let_go(self._session)

    def _receive(self, text: str | bytes) -> None:
        try:
            frame = self._decoder.decode(text)
            if len(frame.id) > _ID:
                raise msgspec.ValidationError(f"an id has at most {_ID} characters")
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError) as error:
            self._refuse(None, EnvRefused("INVALID_JSON", str(error)))
            return
        try:
            self._do(frame)
        except EnvRefused as error:
            self._refuse(frame.id, error)

    def _do(self, frame: Frame) -> None:
        if self._in_flight + len(self._tasks) >= _IN_FLIGHT:
            raise EnvRefused("VALIDATION_ERROR", "too many requests at once")
        if frame.do == "open":
            self._spawn(frame.id, self._open(frame.given))
            return
        session = self._session
        if session is None:
            raise EnvRefused("SESSION_ERROR", "open a session first")
        if frame.do == "cancel":
            self._answer(frame.id, EnvResult.of({"cancelled": session.cancel()}))
        elif frame.do == "close":
            self._let_go(session)
            self._spawn(frame.id, self._close(session))
        else:
            if frame.seen:
                session.forget(frame.seen)
            name = frame.id
            session.start_move(frame.do, frame.given, name, lambda answer: self._finish(name, answer))
            self._in_flight += 1

    def _finish(self, name: str, answer: EnvResult) -> None:
        self._in_flight -= 1
        self._answer(name, answer)

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_and_answer(name, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_and_answer(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(name, EnvResult.of(await work))
        except EnvRefused as error:
            self._refuse(name, error)

    async def _open(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            frame = msgspec.convert(given, OpenFrame)
        except msgspec.ValidationError as error:
            raise EnvRefused("VALIDATION_ERROR", str(error)) from error
        if self._session is not None or self._opening:
            raise EnvRefused("SESSION_ERROR", "this connection has a session")
        self._opening = True
        try:
            if frame.session is not None:
                return await self._reopen(frame.session, frame.lease or "")
            session = await self._sessions.open(
                lease_s=frame.lease_s, deadline_s=frame.deadline_s, queue_s=frame.queue_s
            )
        finally:
            self._opening = False
        answer = self._keep_session(session) | {"lease": session.lease}
        return answer | ({"agent_key": session.agent_key} if self._agent_keys else {})

    async def _reopen(self, session_id: str, lease: str) -> dict[str, Any]:
        session = await self._sessions.find(session_id)
        if not session.holds(lease):
            raise EnvRefused("SESSION_ERROR", "there is no such session")
        self._sessions.counters.sessions["reattached"] += 1
        return self._keep_session(session)

    def _keep_session(self, session: EnvSession) -> dict[str, Any]:
        self._sessions.attach(session)
        self._session = session
        session.heard = self._progress
        return {"session": session.id, "lease_s": session.lease_s, "deadline_s": session.deadline_s}

    def _let_go(self, session: EnvSession) -> None:
        self._session = None
        if session.heard == self._progress:
            session.heard = None
        self._sessions.detach(session)

    async def _close(self, session: EnvSession) -> dict[str, Any]:
        await self._sessions.close(session)
        return {}

    def _progress(self, name: str | None, done: float, total: float | None, message: str | None) -> None:
        frame = {"event": "progress", "id": name, "done": done, "total": total, "message": message}
        self._peer.send(msgspec.json.encode(frame))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._sessions.limits.heartbeat_s)
            self._peer.send(msgspec.json.encode({"event": "heartbeat", "waiting": self._sessions.waiting}))

    def _answer(self, name: str, answer: EnvResult) -> None:
        if answer.error is not None:
            self._refuse(name, answer.error)
        else:
            self._peer.send(b'{"id":%b,"ok":%b}' % (msgspec.json.encode(name), answer.raw))

    def _refuse(self, name: str | None, error: EnvRefused) -> None:
        frame: dict[str, Any] = {"error": {"code": error.code, "message": error.message}}
        self._peer.send(msgspec.json.encode(frame if name is None else {"id": name, **frame}))
