"""One access log, one metric and one span for every request, whichever API of the plane answers it.

No path, header or query is ever written down: some of them are secrets. What is told is the route as its table has it, who asked
(the key's id, never the key), which instance it was about, and a trace id: the one that came in `traceparent`, or a new one. It
goes back in `X-Trace-Id`. Spans need a tracer provider that the program has set up; without one, nothing is made.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.plane.service.metrics import PlaneCounters
from rollyard.plane.service.request_note import CURRENT, RequestNote

_log = Log("rollyard.plane")
_NOWHERE = "no route"
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_PROBES = ("/health", "/ready")  # asked every few seconds by who keeps the server alive
_FAILED = 500


class RequestLog:
    """What every API's `watch` shares."""

    def __init__(self, counters: PlaneCounters, *, lines: bool = False) -> None:
        self._counters, self._lines = counters, lines

    def watch(self, api: str) -> Middleware:
        """For a Starlette application, whose routes are read from itself."""
        return Middleware(WatchedApp, log=self, api=api)

    def end(self, note: RequestNote, method: str, route: str, status: int, seconds: float) -> None:
        self._counters.count_answer(note.api, method, route, status, seconds)
        if not self._lines or (route in _PROBES and status < 400):
            return
        caller, instance = note.caller, note.instance
        who: dict[str, Any] = {}
        if caller is not None:
            who = {"key": caller.id, "owner": caller.owner, "role": caller.role}
        elif instance is not None:
            who = {"owner": instance.owner}
        what = {"api": note.api, "method": method, "route": route, "status": status, "ms": round(seconds * 1000, 1)}
        _log.info("request", **what, instance=None if instance is None else instance.id, trace=note.trace_id, **who)


class WatchedApp:
    """`route` is for an app without routes of its own."""

    def __init__(self, app: ASGIApp, log: RequestLog, api: str, route: str | None = None) -> None:
        self._app, self._log, self._api, self._route = app, log, api, route
        self._routes: RouteNames | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if self._routes is None and self._route is None:
            self._routes = RouteNames(scope["app"].routes)
        headers = Headers(scope=scope)
        parent = _PARENT.fullmatch(headers.get("traceparent", ""))
        note = RequestNote(self._api, parent[1] if parent else secrets.token_hex(16))
        status, began, method, path = None, time.perf_counter(), scope.get("method", "WS"), scope["path"]

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                MutableHeaders(scope=message)["x-trace-id"] = note.trace_id
            elif message["type"] == "websocket.accept":
                status = 101
            elif message["type"] == "websocket.close" and status is None:
                status = 403
            await send(message)

        current = CURRENT.set(note)
        with start_span(f"plane.{self._api}", headers) as span:
            try:
                await self._app(scope, receive, sending)
            except Exception as error:  # whatever it was, the caller is told an id and the log why
                incident = new_id("err")
                _log.error("a request failed", id=incident, api=self._api, method=method, exc_info=error)
                if status is not None or scope["type"] != "http":
                    raise  # the connection ends in the middle, so that a part is not taken for the whole
                await _tell(incident)(scope, receive, sending)
            finally:
                CURRENT.reset(current)
                route = self._route or (self._routes.find(scope, path) if self._routes else _NOWHERE)
                self._log.end(note, method, route, status or _FAILED, time.perf_counter() - began)
                if span is not None:
                    span.set_attributes(_attributes(note, method, route, status or _FAILED))


def _tell(incident: str) -> Response:
    """In a shape that the clients of all APIs find words in."""
    words = "the server failed; its log says why"
    shown = {"code": "internal", "message": words, "id": incident}
    return JSONResponse({"error": shown, "code": 500, "message": words, "detail": words}, 500)


class RouteNames:
    """The paths of an application's routes as its table has them, found again by what answered."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_endpoint: dict[int, list[tuple[re.Pattern[str], str]]] = {}
        self._mounts: list[str] = []
        self._add(routes, "")

    def _add(self, routes: Iterable[BaseRoute], prefix: str) -> None:
        for route in routes:
            if isinstance(route, Mount):
                path = prefix + route.path
                self._by_endpoint.setdefault(id(route.app), []).append((re.compile(""), path))
                self._mounts += [path] if "{" not in path else []
                self._add(route.routes, path)
            elif isinstance(route, (Route, WebSocketRoute)):
                found = (compile_path(prefix + route.path)[0], prefix + route.path)
                self._by_endpoint.setdefault(id(route.endpoint), []).append(found)

    def find(self, scope: Scope, path: str) -> str:
        known = self._by_endpoint.get(id(scope.get("endpoint")), [])
        if len(known) == 1:
            return known[0][1]
        below = path.removeprefix(scope.get("root_path", ""))
        matching = (name for pattern, name in known if pattern.match(path) or pattern.match(below))
        mounts = (name for name in self._mounts if "endpoint" in scope and path.startswith(f"{name}/"))
        return next(matching, None) or next(mounts, _NOWHERE)


def start_span(name: str, headers: Headers) -> AbstractContextManager[Any]:
    """A span below the caller's, where the program has a tracer; OpenTelemetry is not even imported unless it has."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return nullcontext()
    parent = None
    if (found := _PARENT.fullmatch(headers.get("traceparent", ""))) is not None:
        known = trace.SpanContext(
            int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(found[3], 16))
        )
        parent = trace.set_span_in_context(trace.NonRecordingSpan(known))
    return trace.get_tracer("rollyard.plane").start_as_current_span(name, context=parent)


def _attributes(note: RequestNote, method: str, route: str, status: int) -> dict[str, Any]:
    found = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "plane.owner": note.caller.owner if note.caller is not None else None,
        "plane.instance": note.instance.id if note.instance is not None else None,
        "plane.trace": note.trace_id,
    }
    return {name: value for name, value in found.items() if value is not None}
