"""The control port: instances made, shown, listed, given URLs and deleted, in AEnvironment's envelope.

Creating returns when the instance runs. A request for one that is still being made is held until it runs, so the package's poll
every two seconds never has to wait. A list comes in the two shapes that its two clients read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollyard.core.errors import Error, PlaneInvalid, PlaneNotFound, PlaneUnsupported
from rollyard.core.plane import ApiKey, EnvRecord, Instance, Role
from rollyard.core.sandbox import Mount
from rollyard.plane.compat.aenv.callers import AenvCallers
from rollyard.plane.compat.aenv.envelope import failure, ok, read, seconds
from rollyard.plane.compat.aenv.shapes import OWNER_LABEL, check_runnable, instance_shape
from rollyard.plane.gateway.gateway import Gateway
from rollyard.plane.http.wire import MAX_BODY, raw_body
from rollyard.plane.service.access import check_visible, show_env
from rollyard.plane.service.hub import Hub
from rollyard.plane.service.instances import CreateInstance, Instances

USERS: tuple[Role, ...] = ("admin", "owner", "trainer")
_HELD_S = 30.0  # its client waits 60
_LOOK_S = 0.05
_SDK_MARK = "env-instance-trace-id"  # only the package sends it; its command line does not
Endpoint = Callable[[Request], Awaitable[Response]]


class _Create(msgspec.Struct, frozen=True, kw_only=True):
    """`envNAME` and `envversion`, which the package adds to the variables, are passed on like the others."""

    envName: str
    datasource: str = ""
    ttl: str = ""
    environment_variables: dict[str, str] | None = None
    arguments: tuple[str, ...] | None = None
    owner: str | None = None
    labels: dict[str, str] | None = None
    mount_points: tuple[dict[str, str], ...] | None = None


class _Presign(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    expiration_time_in_minutes: float = 5.0


def envelope(endpoint: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Error as error:
            return failure(error)

    return answer


class AenvControl:
    def __init__(
        self, hub: Hub, instances: Instances, gateway: Gateway, callers: AenvCallers, *, public_url: str
    ) -> None:
        self._hub, self._instances, self._gateway, self._callers = hub, instances, gateway, callers
        self._public_url = public_url

    def routes(self) -> list[Route]:
        def at(path: str, endpoint: Endpoint, method: str) -> Route:
            return Route(path, envelope(endpoint), methods=[method])

        return [
            at("/env-instance", self.create, "POST"),
            at("/env-instance/list", self.list, "GET"),
            at("/env-instance/{id}", self.get, "GET"),
            at("/env-instance/{id}", self.delete, "DELETE"),
            at("/env-instance/{id}/list", self.list, "GET"),
            at("/env-instance/{id}/presign-url", self.presign, "POST"),
            at("/env-service/{id}/list", self.no_services, "GET"),
            Route("/env-service", envelope(_no_service), methods=["POST"]),
            Route("/env-service/{id}", envelope(_no_service), methods=["GET", "PUT", "DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        caller = await self._callers.caller(request, *USERS)
        payload = _convert(await raw_body(request, MAX_BODY), _Create)
        if payload.datasource:
            raise PlaneUnsupported("datasource is not served here", hint="push an environment with that image")
        name, _, version = payload.envName.partition("@")
        if name and version:
            check_runnable(show_env(caller, await self._hub.get(name, version)))
        labels = dict(payload.labels or {})
        if payload.owner:
            labels[OWNER_LABEL] = payload.owner
        wanted = CreateInstance(
            env=payload.envName,
            ttl_s=seconds(payload.ttl),
            labels=labels,
            environment=payload.environment_variables or {},
            arguments=payload.arguments or (),
            mount_points=tuple(_mount(mount) for mount in payload.mount_points or ()),
        )
        made = await self._instances.create(wanted, owner=caller.owner, caller=caller.id)
        return ok(await self._show(made, caller))

    async def get(self, request: Request) -> Response:
        caller, found = await self._find_own(request)
        until = asyncio.get_running_loop().time() + _HELD_S
        while found.state == "creating" and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_S)
            found = await self._instances.record(found.id)
        if not found.live and found.state != "failed":
            raise PlaneNotFound(f"instance {found.id} is gone ({found.state})")
        return ok(await self._show(found, caller))

    async def delete(self, request: Request) -> Response:
        _, own = await self._find_own(request)
        await self._instances.delete(own.id)
        return ok("Deleted successfully")

    async def list(self, request: Request) -> Response:
        """Of one environment's name, one `name@version`, or all."""
        caller = await self._callers.caller(request, *USERS)
        wanted = request.path_params.get("id", "*")
        if wanted == "*":
            wanted = request.query_params.get("envName") or "*"
        status = request.query_params.get("status")
        shown = [await self._show(one, caller) for one in await self._list_all(caller, wanted)]
        items = [one for one in shown if status in (None, "", one["status"])]
        return ok({"items": items, "total": len(items)} if _SDK_MARK in request.headers else items)

    async def presign(self, request: Request) -> Response:
        _, own = await self._find_own(request)
        wanted = _convert(await raw_body(request, MAX_BODY), _Presign)
        url, _ = await self._gateway.presign(
            own.id, wanted.port, wanted.expiration_time_in_minutes, base_url=self._public_url
        )
        return ok({"url": url})

    async def no_services(self, request: Request) -> Response:
        await self._callers.caller(request, *USERS)
        return ok([])

    async def _find_own(self, request: Request) -> tuple[ApiKey, Instance]:
        caller = await self._callers.caller(request, *USERS)
        found = await self._instances.record(request.path_params["id"])
        check_visible(caller, found)
        return caller, found

    async def _list_all(self, caller: ApiKey, wanted: str) -> list[Instance]:
        owner = None if caller.role == "admin" else caller.owner
        found = self._instances.all(owner=owner, env=wanted if "@" in wanted else None)
        return [one async for one in found if "@" in wanted or wanted in ("*", (one.env or "").partition("@")[0])]

    async def _show(self, instance: Instance, caller: ApiKey) -> dict[str, Any]:
        return instance_shape(instance, await self._record(instance, caller), self._callers.host(instance.id))

    async def _record(self, instance: Instance, caller: ApiKey) -> EnvRecord | None:
        if instance.env is None:
            return None
        try:
            return show_env(caller, await self._hub.get(*instance.env.split("@", 1)))
        except PlaneNotFound:
            return None  # deleted since; the instance goes on


async def _no_service(request: Request) -> Response:
    raise PlaneUnsupported("services are not served here", hint="create instances")


def _convert(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(read(raw), kind)
    except msgspec.ValidationError as error:
        raise PlaneInvalid(f"the body is not what this call takes: {error}") from error


def _mount(given: dict[str, str]) -> Mount:
    try:
        return msgspec.convert(given, Mount)
    except msgspec.ValidationError as error:
        raise PlaneInvalid(f"a mount point is id, remote_dir and local_dir: {error}") from error
