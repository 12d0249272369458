"""The compatible APIs of one plane put together, and which answers a request: by the socket it came in on, then by its path.

E2B's client builds some URLs from the host alone, so its paths are at the root, beside the plane's own; `/health` is E2B's only
where the request names a sandbox. Fleet's is below `/fleet`, ROCK's below `/rock/KEY`, AEnvironment's has an address of its own.
Clients of other systems get one key that is no admin's; it follows from the admin's, so it is the same again after a restart.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.plane.compat.aenv.app import aenv_apps, aenv_sockets
from rollyard.plane.compat.aenv.callers import AenvCallers
from rollyard.plane.compat.e2b.app import e2b_app
from rollyard.plane.compat.fleet.open import FleetOptions, FleetParts, open_fleet, open_fleet_app
from rollyard.plane.compat.rock.app import rock_app
from rollyard.plane.http.request_log import RequestLog
from rollyard.plane.parts import PlaneParts
from rollyard.store import Store

_E2B = (
    "/sandboxes",
    "/v2/sandboxes",
    "/files",
    "/templates",
    "/v2/templates",
    "/v3/templates",
    "/volumes",
    "/snapshots",
    "/secrets",
    "/process.Process",
    "/filesystem.Filesystem",
)
_FLEET, _ROCK = "/fleet", "/rock"
_OF_A_SANDBOX = (b"e2b-sandbox-id", b"x-access-token")


class CompatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`aenv` is an address, `auto` for a spare loopback one, or `off`; `aenv_keys` refuses its clients without a key."""

    aenv: str = "auto"
    aenv_keys: bool = False
    fleet: FleetOptions = FleetOptions()


class CompatParts(NamedTuple):
    """The options read, and listened for. Whatever may be refused about them has been, and nothing was written."""

    fleet: FleetParts
    aenv: tuple[socket.socket, socket.socket] | None
    aenv_keys: bool


@asynccontextmanager
async def open_compat_parts(options: CompatOptions) -> AsyncGenerator[CompatParts]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet(options.fleet))
        aenv = None if options.aenv == "off" else aenv_sockets(options.aenv)
        for sock in aenv or ():
            stack.callback(sock.close)
        yield CompatParts(fleet, aenv, options.aenv_keys)


class CompatContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the compatible APIs need of the plane. `secret` signs their tokens, `url` is where callers reach the plane and
    `own_url` where the plane reaches itself; rollouts of jobs go to `store`."""

    parts: PlaneParts
    secret: str
    url: str
    own_url: str
    sdk_key: str
    log: RequestLog
    store: Store | None = None


class CompatApps:
    """The plane's app, and those of the compatible APIs for their requests. `at` are apps with an address to themselves;
    `named` are the variables that existing clients find this plane by."""

    def __init__(
        self,
        plane: ASGIApp,
        *,
        e2b: ASGIApp,
        fleet: ASGIApp | None = None,
        rock: ASGIApp | None = None,
        at: Mapping[socket.socket, ASGIApp] | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self._plane, self._e2b, self._fleet, self._rock = plane, e2b, fleet, rock
        self.sockets, self.named = list(at or ()), dict(named or {})
        self._at = {sock.getsockname()[:2]: app for sock, app in (at or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._choose(scope)
        if app is self._fleet:
            scope = {**scope, "root_path": scope.get("root_path", "") + _FLEET}
        await app(scope, receive, send)

    def _choose(self, scope: Scope) -> ASGIApp:
        own = self._at.get(tuple(scope.get("server") or ()))
        path: str = scope.get("path", "")
        if own is not None:
            return own
        if self._fleet is not None and path.startswith(_FLEET + "/"):
            return self._fleet
        if self._rock is not None and path.startswith(_ROCK + "/"):
            return self._rock
        if any(path == place or path.startswith(place + "/") for place in _E2B):
            return self._e2b
        if path == "/health" and any(name in _OF_A_SANDBOX for name, _ in scope["headers"]):
            return self._e2b
        return self._plane


@asynccontextmanager
async def open_compat_apps(app: ASGIApp, context: CompatContext, given: CompatParts) -> AsyncGenerator[CompatApps]:
    parts, url = context.parts, context.url
    named = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": context.sdk_key}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            open_fleet_app(
                parts,
                secret=context.secret,
                url=f"{context.own_url}{_FLEET}",
                given=given.fleet,
                store=context.store,
                log=context.log,
            )
        )
        if fleet is not None:
            named |= {"FLEET_BASE_URL": f"{url}{_FLEET}", "FLEET_API_KEY": context.sdk_key}
        at: dict[socket.socket, ASGIApp] = {}
        if given.aenv is not None:
            address = given.aenv[0].getsockname()[0]
            anonymous = ip_address(address).is_loopback and not given.aenv_keys
            callers = AenvCallers(parts.access, secret=context.secret, anonymous=anonymous)
            apps = aenv_apps(parts, callers, context.log, public_url=url)
            at |= zip(given.aenv, apps, strict=True)
            named["AENV_SYSTEM_URL"] = f"http://[{address}]" if ":" in address else f"http://{address}"
        named["ROCK_BASE_URL"] = f"{url}{_ROCK}/{context.sdk_key}"
        e2b = e2b_app(parts, secret=context.secret, log=context.log)
        rock = rock_app(_ROCK, parts, context.log)
        yield CompatApps(app, e2b=e2b, fleet=fleet, rock=rock, at=at, named=named)


def sdk_key_of(admin_key: str) -> str:
    """In the form that E2B's clients expect."""
    return f"e2b_{hashlib.sha256(f'sdk {admin_key}'.encode()).hexdigest()[:40]}"
