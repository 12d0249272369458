"""Only for those who asked for this machine by its own name: a page on loopback needs no key, so a website whose name was made to
resolve to 127.0.0.1 must not be able to read it through a visitor's browser."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class OnlyHosts:
    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _host(scope) not in self._hosts:
            refused = PlainTextResponse("this page is served under this machine's own name only\n", status_code=403)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(scope: Scope) -> str:
    """Without the port, and an IPv6 address without its brackets."""
    named = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    host, colon, port = named.rpartition(":")
    bare = host if colon and port.isdigit() else named
    return bare.strip("[]").lower()
