"""What a web page in a person's browser sends is not what that person sends.

A server on loopback without a key trusts every client that reaches it. A browser reaches it for every page that is open in it:
by a form or a script of a foreign origin, by a WebSocket, or under a name that the page's own server has pointed at 127.0.0.1.
`page_reason` is the one place that tells such requests apart; every server asks it, as an ASGI wrapper (`NoWebPages`) or by
itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from ipaddress import ip_address
from typing import Any

from rollyard.net.binding import LOOPBACK

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

# What a form, or a script without a preflight, may send to another origin.
_SIMPLE = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
_READS = ("GET", "HEAD", "OPTIONS")


class AllowedHosts:
    """Names under which a server may be asked for. One on loopback is known by loopback's names and what is added to them;
    one beyond it by any, since only its operator knows how it is reached."""

    def __init__(self, bound_to: str, *more: str) -> None:
        self._all = bound_to not in LOOPBACK and not _is_loopback(bound_to)
        self._more = frozenset(name.lower() for name in more)

    def __contains__(self, header: bytes) -> bool:
        name = host_name(header.decode("latin-1"))
        return self._all or name in self._more or _is_loopback(name)


def page_reason(method: str, headers: Mapping[bytes, bytes], hosts: AllowedHosts, *, forms: bool = False) -> str | None:
    """Why a request is a web page's, or None. Header names are in lower case. `forms`: this server has pages of its own, whose
    forms and scripts are let in."""
    host = headers.get(b"host", b"")
    if host not in hosts:
        return "this server is asked for under its own name only"
    origin = headers.get(b"origin")
    if origin is not None and origin.rpartition(b"://")[2].lower() != host.lower():
        return "requests of web pages are not answered here"
    own = (b"none", b"same-origin") if forms else (b"none",)
    if headers.get(b"sec-fetch-site", b"none") not in own:
        return "requests of web pages are not answered here"
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not forms and method not in _READS and kind in _SIMPLE:
        return f"{kind.decode()} is what web pages send; send application/json"
    return None


class NoWebPages:
    """An application that web pages do not reach. A WebSocket of theirs is refused before it is accepted."""

    def __init__(self, app: _App, hosts: AllowedHosts, *, forms: bool = False) -> None:
        self._app, self._hosts, self._forms = app, hosts, forms

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] in ("http", "websocket"):
            method = scope.get("method", "GET")
            why = page_reason(method, dict(_headers(scope["headers"])), self._hosts, forms=self._forms)
            if why is not None:
                await _refuse(scope["type"], why, send)
                return
        await self._app(scope, receive, send)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    return ((name.lower(), value) for name, value in pairs)


async def _refuse(kind: str, why: str, send: _Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": why})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def host_name(header: str) -> str:
    """The host of a `Host` header: without the port, and an IPv6 address without its brackets."""
    host, colon, port = header.rpartition(":")
    bare = host if colon and port.isdigit() else header
    return bare.strip("[]").rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    if name in LOOPBACK:
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
