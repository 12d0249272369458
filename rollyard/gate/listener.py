"""One listener of a gate: which keys it accepts, and what answers each request.

A sandbox's listener serves the agent's API alone: its own rollout's calls and tools. The gate's own address also serves the
operator's and the trainer's, each with a key of its own. Keys are checked when the headers are in, before a byte of
the body is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollyard.core.call import Dialect
from rollyard.core.errors import GateError, Unauthorized
from rollyard.gate.black_box import relay
from rollyard.gate.keys import key_of
from rollyard.gate.processes import CLIENT, MISDIRECTED, SIBLING, UNIX_CLIENT, GateProcess
from rollyard.net import asgi
from rollyard.net.exchange import Exchange
from rollyard.net.http_server import HttpConnection, HttpLimits
from rollyard.net.movable_connection import MovableConnection
from rollyard.net.web_pages import AllowedHosts, page_reason
from rollyard.wire import CODECS, Route, provider_path, route

if TYPE_CHECKING:
    from rollyard.gate.gate import Gate
    from rollyard.gate.session import Session

_OPERATOR = ("sessions", "metrics", "calls", "policy_version", "pause", "resume")
_ROUTES = 2048


class NotFound(GateError):
    status = 404
    code = "not_found_error"


class GateListener:
    """An `HttpService`. `session` is the only one whose key is accepted, when it is set. `operator` adds the admin and trainer
    APIs. The other processes of the gate, where it has some, know this listener by `label`."""

    def __init__(
        self,
        gate: Gate,
        *,
        session: Session | None = None,
        operator: bool = False,
        hosts: AllowedHosts | None = None,
        capacity: int | None = None,
        label: bytes | None = None,
    ) -> None:
        self.limits: HttpLimits = gate.limits.http
        self.connections: set[HttpConnection] = set()
        self.closing: Callable[[], Any] | None = None  # stops the listening
        self.label = label
        self._gate = gate
        self._siblings = gate.process if label in (CLIENT, UNIX_CLIENT) else None
        self._session = session
        self._operator = operator
        self._hosts = hosts
        self._capacity = capacity
        self._routes: dict[tuple[str, str, bool, bool, bool], Route | None] = {}

    def connection(self, first: bytes = b"") -> HttpConnection:
        """`first` is what another process read of it."""
        if self._siblings is not None or first:
            return MovableConnection(self, time.monotonic, first)
        return HttpConnection(self, time.monotonic)

    async def aclose(self) -> None:
        if self.closing is not None:
            stop, self.closing = self.closing, None
            await stop()
        for connection in tuple(self.connections):
            connection.close()

    def tick(self, now: float) -> None:
        for connection in tuple(self.connections):
            connection.tick(now)

    # -- HttpService

    def connected(self, connection: HttpConnection) -> bool:
        if self._capacity is not None and len(self.connections) >= self._capacity:
            return False
        self.connections.add(connection)
        return True

    def lost(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)

    def refusal(self, exchange: Exchange, status: int, why: str) -> bytes:
        self._gate.counters.count_refusal(status)
        code = "request_too_large" if status == 413 else "invalid_request_error"
        return CODECS[_dialect(exchange.path)].error(status, code, why)

    def begin(self, exchange: Exchange) -> None:
        path = exchange.path
        if self.label == SIBLING:
            exchange.context = self._gate.operator_app(alone=True)
            return
        if self._siblings is not None and self._move(exchange, self._siblings):
            return
        if path == "/health" or (path == "/" and exchange.method in ("GET", "HEAD")):
            exchange.context = None
            self._refuse_pages(exchange)
            return
        if self._operator and path.split("/", 2)[1] in _OPERATOR:
            exchange.context = self._gate.operator_app(alone=False)
            return
        try:
            exchange.context = self._admit(exchange, path)
        except GateError as error:
            if isinstance(error, Unauthorized):
                self._gate.counters.bad_keys += 1
            self._gate.counters.count_refusal(error.status)
            exchange.keep_alive = False
            body = CODECS[_dialect(path)].error(error.status, error.code, error.message)
            exchange.respond(error.status, body)

    def _move(self, exchange: Exchange, siblings: GateProcess) -> bool:
        """Whether this request is another process's to answer. It goes there with its connection."""
        owner = siblings.owner_of(exchange)
        if owner == siblings.index:
            return False
        if not siblings.move(exchange, owner, self.label or b""):
            self._gate.counters.count_refusal(421)
            exchange.keep_alive = False
            exchange.respond(421, CODECS[_dialect(exchange.path)].error(421, "invalid_request_error", MISDIRECTED))
        return True

    def _refuse_pages(self, exchange: Exchange) -> None:
        """Where no key is asked for, a web page in the operator's browser learns nothing, not even that a gate is here."""
        if self._hosts is not None and (why := page_reason(exchange.method, exchange.headers, self._hosts)) is not None:
            exchange.keep_alive = False
            exchange.respond(403, CODECS["chat"].error(403, "permission_error", why))

    def complete(self, exchange: Exchange) -> None:
        context = exchange.context
        if context is None:
            exchange.respond(200, b'{"status":"ok"}')
        elif isinstance(context, tuple):
            self._serve(exchange, *context)
        else:
            self._gate.spawn(asgi.run(context, exchange, path=exchange.path, state={}))

    # -- the agent's API

    def _admit(self, exchange: Exchange, path: str) -> tuple[Session, Route | None, str]:
        """Whose request this is. Raises when the key opens nothing here, or the path names another rollout."""
        session = self._gate.session_of(key_of(exchange.headers, exchange.query))
        if self._session is not None and session is not self._session:
            raise Unauthorized("this key opens nothing here")
        found = self._route(exchange.method, path, exchange)
        inner = path
        if path.startswith("/r/"):
            named, _, rest = path[3:].partition("/")
            if named != session.rollout_id:
                raise NotFound("this key has no such rollout")
            inner = "/" + rest
        session.check_complete()
        session.reached = True
        if session.budget.body is not None:
            exchange.body_limit = min(exchange.body_limit, session.budget.body)
        if found is None and inner != "/mcp":
            raise NotFound("there is nothing here")
        if found is not None and session.through is not None and found.endpoint != "models":
            inner = provider_path(found, inner)
        return session, found, inner

    def _serve(self, exchange: Exchange, session: Session, found: Route | None, inner: str) -> None:
        if inner == "/mcp":
            if session.tools is None:
                exchange.respond(404, b'{"error":"this rollout has no tools here"}')
                return
            session.spawn(asgi.run(session.tools, exchange, path="/mcp", state={"rollout_id": session.rollout_id}))
        elif found is None:
            exchange.respond(404, b'{"error":"there is nothing here"}')
        elif session.through is not None and found.endpoint != "models":
            limit_s = self._gate.limits.call_s
            session.spawn(relay(self._gate.calls, session, session.through, found, exchange, inner, limit_s))
        elif found.endpoint == "generate":
            self._gate.calls.receive(session, found, exchange)
        elif found.endpoint == "count_tokens":
            self._gate.calls.count(session, found, exchange)
        else:
            codec, model = CODECS[found.dialect], session.model(found.model)
            exchange.respond(200, codec.model(model) if found.model else codec.models([model]))

    def _route(self, method: str, path: str, exchange: Exchange) -> Route | None:
        anthropic = b"anthropic-version" in exchange.headers
        google = b"x-goog-api-key" in exchange.headers
        key = (method, path, b"alt=sse" in exchange.query, anthropic, google)
        try:
            return self._routes[key]
        except KeyError:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            query = {"alt": "sse"} if key[2] else {}
            found = self._routes[key] = route(method, path, query, anthropic=anthropic, google=google)
            return found


def _dialect(path: str) -> Dialect:
    """Whose error shape a path's clients read, before anything else is known."""
    if "/messages" in path:
        return "messages"
    if "/responses" in path:
        return "responses"
    if "/v1beta" in path or "enerateContent" in path:
        return "gemini"
    return "chat"


async def accept(gate_listener: GateListener, listener: Any) -> None:
    """Serve a listener that hands out streams instead of having a socket."""
    from rollyard.net.streams import serve_stream

    async with asyncio.TaskGroup() as group:
        while True:
            stream = await listener.accept()
            group.create_task(serve_stream(stream, gate_listener.connection()))
