"""The gateway: HTTP, event streams and WebSockets to a port inside an instance.

| path | port | who may |
|---|---|---|
| `/v1/instances/{id}/data/...` | the environment's own (`port`) | an API key that sees the instance, or the instance's token |
| `/v1/instances/{id}/mcp` | the same, at `/mcp` | the same |
| `/v1/instances/{id}/port/{port}/...` | any | the same |
| `/at/{signed}/...` | the one that was signed | the holder of the URL, until it expires |

Where a request goes is decided here, from the instance's record, and from nothing that the caller sends. The caller's key does
not travel on. Passing traffic counts as a sign of life.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import Message, Receive, Scope, Send

from rollyard.core.errors import Error, PlaneGone, PlaneInvalid, PlaneNotFound, PlaneUnauthorized, PlaneUnavailable
from rollyard.core.log import Log
from rollyard.core.plane import Instance
from rollyard.core.protocols import ByteStream
from rollyard.net.forward import ForwardLimits, Target, forward_http
from rollyard.net.forward_websocket import forward_ws
from rollyard.plane.engines.choose import refuse
from rollyard.plane.engines.protocol import PresigningEngine
from rollyard.plane.http.wire import refusal
from rollyard.plane.service.access import Access, bearer, check_visible
from rollyard.plane.service.instances import Instances
from rollyard.plane.service.metrics import PlaneCounters
from rollyard.plane.service.signing import Signer

_log = Log("rollyard.plane")
MARK = "ryi-"  # what instance tokens begin with
MAX_MINUTES = 7 * 24 * 60.0
_SEEN_S = 5.0  # how exact the last sign of life is
_Passing = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gateway:
    def __init__(
        self,
        instances: Instances,
        access: Access,
        signer: Signer,
        *,
        limits: ForwardLimits | None = None,
        clock: Callable[[], float] = time.time,
        counters: PlaneCounters | None = None,
    ) -> None:
        self._counters = counters or PlaneCounters()
        self._instances, self._access, self._signer = instances, access, signer
        self.limits = limits or ForwardLimits()
        self._clock = clock

    # what is handed out

    def token(self, instance_id: str) -> str:
        """Opens the gateway to this instance and nothing else, for as long as it lives."""
        return MARK + self._signer.sign("instance", instance_id)

    async def presign(self, instance_id: str, port: int, minutes: float = 5.0, *, base_url: str) -> tuple[str, float]:
        """A URL to one port, and when it ends. `base_url` is where callers reach this plane."""
        _check(port, minutes)
        instance, engine = await self._instances.running(instance_id)
        ends = self._clock() + minutes * 60
        if engine.capabilities.dial:
            signed = self._signer.sign("port", instance_id, str(port), str(math.floor(ends * 1000)))
            return f"{base_url.rstrip('/')}/at/{signed}/", ends
        if not engine.capabilities.presign or not isinstance(engine, PresigningEngine) or instance.ref is None:
            raise refuse(engine, self._instances.engines, "presign", "give a URL to a port")
        return await engine.presign(instance.ref, port, minutes), ends

    # what is passed

    def routes(self) -> list[BaseRoute]:
        return [
            Mount("/v1/instances/{id}/data", app=self._guard(self._data)),
            Mount("/v1/instances/{id}/mcp", app=self._guard(self._mcp)),
            Mount("/v1/instances/{id}/port/{port}", app=self._guard(self._any_port)),
            Mount("/at/{signed}", app=self._guard(self._pass_signed)),
        ]

    async def forward(
        self, scope: Scope, receive: Receive, send: Send, instance: str | Instance, target: Target | None = None
    ) -> None:
        """Pass one request or WebSocket on, for a caller that may. Without a target: the environment's own port, with
        the path as it came. An instance is given by its id, or as the record that was just read."""
        if isinstance(instance, str):
            instance = await self._instances.record(instance)
        target = target or Target(port=instance.plan.port, path=raw_path(scope, 0))
        async with self._dial(instance, target.port) as stream, self._notice(instance):
            passing = forward_http if scope["type"] == "http" else forward_ws
            await passing(scope, receive, send, stream, target, self.limits)

    @asynccontextmanager
    async def dial(self, instance_id: str, port: int) -> AsyncGenerator[ByteStream]:
        """A connection to a port inside a running instance."""
        async with self._dial(await self._instances.record(instance_id), port) as stream:
            yield stream

    @asynccontextmanager
    async def _dial(self, found: Instance, port: int) -> AsyncGenerator[ByteStream]:
        instance, engine = self._instances.check_running(await self._instances.wake(found))
        assert instance.ref is not None
        if not engine.capabilities.dial:
            error = refuse(engine, self._instances.engines, "dial", "carry traffic to its instances")
            error.hint = f"ask for a URL with presign; {error.hint}" if engine.capabilities.presign else error.hint
            raise error
        self._instances.rates.charge(instance.owner)
        try:
            stream = await engine.dial(instance.ref, port)
        except (OSError, TimeoutError) as error:
            raise PlaneUnavailable(f"port {port} of {instance.id} cannot be reached") from error
        try:
            yield stream
        finally:
            await stream.aclose()

    @asynccontextmanager
    async def _notice(self, instance: Instance) -> AsyncGenerator[None]:
        """While this lasts the instance is not idle."""
        every = max(0.05, min(_SEEN_S, (instance.idle_ttl_s or math.inf) / 3))

        async def beat() -> None:
            while True:
                await asyncio.sleep(every)
                await self._instances.heartbeat(instance.id)

        if self._clock() - instance.last_seen_at > every:
            await self._instances.heartbeat(instance.id)
        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)  # the last beat of one that has ended fails, and may

    # the four ways in

    async def _data(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance = await self._admit(scope)
        target = Target(port=instance.plan.port, path=raw_path(scope, 4), prefix=raw_prefix(scope, 4))
        await self.forward(scope, receive, send, instance, target)

    async def _mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance = await self._admit(scope)
        rest = raw_path(scope, 4)
        path = b"/mcp" + (rest[1:] if rest.startswith(b"/?") or rest == b"/" else rest)
        await self.forward(scope, receive, send, instance, Target(port=instance.plan.port, path=path))

    async def _any_port(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance = await self._admit(scope)
        text = scope["path_params"]["port"]
        port = int(text) if text.isdigit() and len(text) <= 5 else 0
        _check(port, 1.0)
        target = Target(port=port, path=raw_path(scope, 5), prefix=raw_prefix(scope, 5))
        await self.forward(scope, receive, send, instance, target)

    async def _pass_signed(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = self._signer.read("port", scope["path_params"]["signed"], 3)
        if fields is None:
            raise PlaneUnauthorized("this URL was not signed by this plane")
        instance_id, port, ends = fields
        if self._clock() * 1000 >= int(ends):
            raise PlaneGone("this URL has expired", hint="ask for another")
        target = Target(port=int(port), path=raw_path(scope, 2), prefix=raw_prefix(scope, 2))
        await self.forward(scope, receive, send, instance_id, target)

    async def _admit(self, scope: Scope) -> Instance:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        instance_id: str = scope["path_params"]["id"]
        text = bearer(header)
        if text.startswith(MARK):
            if not hmac.compare_digest(text.encode(), self._own_token(instance_id)):
                raise PlaneNotFound(f"there is no instance {instance_id}")
            return await self._instances.record(instance_id)
        caller = await self._access.caller(header)
        found = await self._instances.record(instance_id)
        check_visible(caller, found)
        return found

    def _own_token(self, instance_id: str) -> bytes:
        try:
            return self.token(instance_id).encode()
        except ValueError:  # no instance has such a name
            return b""

    def _guard(self, passing: _Passing) -> _Passing:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            started = False

            async def sending(message: Message) -> None:
                nonlocal started
                started = True
                await send(message)

            if scope["type"] == "websocket":
                await receive()
            self._counters.passing += 1
            try:
                await passing(scope, receive, sending)
            except (Error, OSError, TimeoutError) as error:
                if started:  # the connection ends in the middle, so that a part is not taken for the whole
                    _log.warning(
                        "an answer broke off", kind=type(error).__name__, instance=scope["path_params"].get("id")
                    )
                    return
                shown = error if isinstance(error, Error) else PlaneUnavailable("the instance did not answer")
                await _refuse(scope, receive, send, refusal(shown))
            finally:
                self._counters.passing -= 1

        return app


async def _refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "http":
        await response(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        start = {"status": response.status_code, "headers": response.raw_headers}
        await send({"type": "websocket.http.response.start", **start})
        await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
    else:
        await send({"type": "websocket.close", "code": 1008})


def _check(port: int, minutes: float) -> None:
    if not 1 <= port <= 65535:
        raise PlaneInvalid("port is from 1 to 65535")
    if not 0 < minutes <= MAX_MINUTES:
        raise PlaneInvalid(f"minutes is above 0 and at most {MAX_MINUTES:.0f}")


def raw_path(scope: Scope, segments: int) -> bytes:
    """The path as it came, percent signs and query and all, without its first `segments` segments."""
    parts = scope["raw_path"].partition(b"?")[0].split(b"/", segments + 1)
    path = b"/" + (parts[segments + 1] if len(parts) > segments + 1 else b"")
    query = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def raw_prefix(scope: Scope, segments: int) -> bytes:
    return b"/".join(scope["raw_path"].partition(b"?")[0].split(b"/", segments + 1)[: segments + 1])
