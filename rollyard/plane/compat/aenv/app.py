"""The two ports' apps, and the address that both are free on."""

from __future__ import annotations

import socket

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollyard.core.errors import CannotListen
from rollyard.net.binding import listen
from rollyard.plane.compat.aenv.callers import AenvCallers
from rollyard.plane.compat.aenv.control import AenvControl
from rollyard.plane.compat.aenv.data import DataPort
from rollyard.plane.compat.aenv.hub import AenvHub
from rollyard.plane.http.request_log import RequestLog, WatchedApp
from rollyard.plane.http.wire import answer
from rollyard.plane.parts import PlaneParts

CONTROL_PORT, DATA_PORT = 8080, 8081
_SPARE = tuple(f"127.0.0.{last}" for last in range(2, 34))


def aenv_apps(plane: PlaneParts, callers: AenvCallers, log: RequestLog, *, public_url: str) -> tuple[ASGIApp, ASGIApp]:
    """Control and data. `public_url` is where signed URLs lead."""

    async def health(request: Request) -> Response:
        return answer({})

    control = AenvControl(plane.hub, plane.instances, plane.gateway, callers, public_url=public_url)
    hub = AenvHub(plane.hub, plane.projects, callers, public_url=public_url)
    routes = [*control.routes(), *hub.routes(), Route("/health", health)]
    data = DataPort(plane.instances, plane.gateway, callers)
    return Starlette(routes=routes, middleware=[log.watch("aenv")]), WatchedApp(data, log, "aenv", route="data port")


def aenv_sockets(address: str) -> tuple[socket.socket, socket.socket] | None:
    """Both ports at `address`; at the first spare loopback address for `auto`, or None where this machine has none."""
    if address != "auto":
        return _listen_both(address)
    for spare in _SPARE:
        try:
            return _listen_both(spare)
        except CannotListen:
            continue
    return None


def _listen_both(address: str) -> tuple[socket.socket, socket.socket]:
    control = listen(address, CONTROL_PORT)
    try:
        return control, listen(address, DATA_PORT)
    except CannotListen:
        control.close()
        raise
