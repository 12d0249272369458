"""The hub's calls of AEnvironment's command line: a project is pushed, shown, listed, released. Both slash forms are answered."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollyard.core.errors import PlaneForbidden, PlaneInvalid, PlaneNotFound, PlaneUnsupported
from rollyard.core.plane import ApiKey, EnvRecord, Role
from rollyard.plane.compat.aenv.callers import AenvCallers
from rollyard.plane.compat.aenv.control import Endpoint, envelope
from rollyard.plane.compat.aenv.envelope import ok, read
from rollyard.plane.compat.aenv.shapes import env_shape, spec_of, status_word, with_files
from rollyard.plane.http.wire import MAX_BODY, number, raw_body
from rollyard.plane.service.access import check_may_change, show_env
from rollyard.plane.service.hub import Hub
from rollyard.plane.service.projects import Projects

_READERS: tuple[Role, ...] = ("admin", "owner", "trainer", "agent")
_WRITERS: tuple[Role, ...] = ("admin", "owner")


class AenvHub:
    """`public_url` is where the URLs lead that projects are sent to."""

    def __init__(self, hub: Hub, projects: Projects, callers: AenvCallers, *, public_url: str) -> None:
        self._hub, self._projects, self._callers = hub, projects, callers
        self._public_url = public_url

    def routes(self) -> list[Route]:
        def at(path: str, endpoint: Endpoint, method: str) -> list[Route]:
            return [Route(path + slash, envelope(endpoint), methods=[method]) for slash in ("", "/")]

        return [
            *at("/env", self.create, "POST"),
            *at("/env", self.list, "GET"),
            *at("/env/{name}/{version}", self.get, "GET"),
            *at("/env/{name}/{version}", self.update, "PUT"),
            *at("/env/{name}/{version}/exists", self.exists, "GET"),
            *at("/env/{name}/{version}/status", self.status, "GET"),
            *at("/env/{name}/{version}/release", self.release, "POST"),
            *at("/env/{name}/{version}/sign", self.sign, "POST"),
            *at("/env/{name}", self.delete, "DELETE"),
        ]

    async def create(self, request: Request) -> Response:
        caller = await self._callers.caller(request, *_WRITERS)
        body = read(await raw_body(request, MAX_BODY))
        name, version = body.get("name"), body.get("version")
        if not isinstance(name, str) or not isinstance(version, str):
            raise PlaneInvalid("a project has a name and a version")
        spec = with_files(spec_of(body), await self._projects.find(caller.owner, name, version))
        return ok(env_shape(await self._hub.create(name, version, spec, by=caller)))

    async def list(self, request: Request) -> Response:
        caller = await self._callers.caller(request, *_READERS)
        start, limit = number(request, "offset", 0), number(request, "limit", 100)
        return ok([env_shape(record) for record in (await self._list_all(caller))[start : start + limit]])

    async def get(self, request: Request) -> Response:
        return ok(env_shape((await self._read(request))[1]))

    async def exists(self, request: Request) -> Response:
        try:
            _, found = await self._read(request)
        except PlaneNotFound:
            return ok({"exists": False})
        return ok({"exists": True, "status": status_word(found)})

    async def status(self, request: Request) -> Response:
        return ok({"status": status_word((await self._read(request))[1])})

    async def update(self, request: Request) -> Response:
        caller, before = await self._read(request, *_WRITERS)
        check_may_change(caller, before)
        if before.status == "released":
            raise PlaneForbidden(f"{before.id} is released and never changes")
        body = read(await raw_body(request, MAX_BODY))
        files = await self._projects.find(caller.owner, before.name, before.version)
        spec = with_files(spec_of(body, before.spec), files)
        changed = await self._hub.update(before.name, before.version, spec, revision=before.revision, by=caller)
        return ok(env_shape(changed))

    async def release(self, request: Request) -> Response:
        caller, before = await self._read(request, *_WRITERS)
        check_may_change(caller, before)
        if before.status == "released":
            raise PlaneForbidden(f"{before.id} is released already")
        made = await self._hub.release(before.name, before.version, revision=before.revision, by=caller)
        return ok(env_shape(made))

    async def sign(self, request: Request) -> Response:
        """A URL of our own, where there is an object store elsewhere: the client puts the project's archive there before it
        registers the project."""
        caller = await self._callers.caller(request, *_WRITERS)
        if request.query_params.get("style") == "read":
            raise PlaneUnsupported("projects are not read back here", hint="`rollyard` has plane.client.push.pull")
        return ok(self._projects.upload_url(caller.owner, **request.path_params, base_url=self._public_url))

    async def delete(self, request: Request) -> Response:
        """All versions of a name, as its client asks; a released one only for an admin."""
        caller = await self._callers.caller(request, *_WRITERS)
        for record in await self._list_all(caller):
            if record.name == request.path_params["name"]:
                await self._hub.delete(record.name, record.version, by=caller)
        return ok(True)

    async def _read(self, request: Request, *roles: Role) -> tuple[ApiKey, EnvRecord]:
        caller = await self._callers.caller(request, *(roles or _READERS))
        return caller, show_env(caller, await self._hub.get(**request.path_params))

    async def _list_all(self, caller: ApiKey) -> list[EnvRecord]:
        found: list[EnvRecord] = []
        async for record in self._hub.all():
            try:
                found.append(show_env(caller, record))
            except PlaneNotFound:
                continue  # for a caller without a key it is not there
        return found
