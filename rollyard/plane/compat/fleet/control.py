"""The orchestrator's half: environments, instances, runs, account. Times are RFC 3339 in UTC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import Error
from rollyard.plane.compat.fleet.errors import FleetRefusal, refuse
from rollyard.plane.compat.fleet.guard import Guard
from rollyard.plane.compat.fleet.instances import REGIONS, FleetCreate, WorldInstance, WorldInstances
from rollyard.plane.http.wire import raw_body
from rollyard.plane.service.shapes import rfc3339

T = TypeVar("T")
_MAX_BODY = 32 * 2**20
Endpoint = Callable[[Request, str], Awaitable[Response]]


def for_owner(guard: Guard, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint for callers with an API key; it gets the owner's name."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request, await guard.owner(request))
        except (FleetRefusal, Error) as error:
            return refuse(error)

    return answer


async def body(request: Request, kind: type[T]) -> T:
    data = await raw_body(request, _MAX_BODY)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except BAD_JSON as error:
        raise FleetRefusal(422, f"the body is not what this route takes: {error}") from error


class FleetControl:
    def __init__(self, places: WorldInstances, guard: Guard) -> None:
        self._places, self._guard = places, guard

    def routes(self) -> list[Route]:
        def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
            return Route(path, for_owner(self._guard, endpoint), methods=[method])

        return [
            route("/v1/env/instances", self.make, "POST"),
            route("/v1/env/instances", self.instances),
            route("/v1/env/instances/batch", self.close_all, "DELETE"),
            route("/v1/env/instances/{id}", self.instance),
            route("/v1/env/instances/{id}", self.close, "DELETE"),
            route("/v1/env/instances/{id}/heartbeat", self.heartbeat, "POST"),
            route("/v1/env/runs", self.runs),
            route("/v1/env", self.environments),
            route("/v1/env/", self.environments),
            route("/v1/env/{key}", self.environment),
            route("/v1/regions", self.regions),
            route("/v1/account", self.account),
            route("/v1/runner-auth/token", self.runner_token),
        ]

    async def make(self, request: Request, owner: str) -> Response:
        wanted = await body(request, FleetCreate)
        place = await self._places.make(owner, wanted, request.headers.get("x-request-id"))
        return JSONResponse(self._tell(place, request))

    async def instances(self, request: Request, owner: str) -> Response:
        wanted = request.query_params
        status = wanted.get("status")
        found = await self._places.list(owner, live=None if status else True)
        if status:
            found = [place for place in found if place.status == status]
        if run_id := wanted.get("run_id"):
            found = [place for place in found if place.make.run_id == run_id]
        return JSONResponse([self._tell(place, request) for place in found])

    async def instance(self, request: Request, owner: str) -> Response:
        return JSONResponse(self._tell(await self._places.find(request.path_params["id"], owner), request))

    async def close(self, request: Request, owner: str) -> Response:
        place = await self._places.find(request.path_params["id"], owner)
        return JSONResponse(self._tell(await self._places.close(place), request))

    async def close_all(self, request: Request, owner: str) -> Response:
        run_id, everybody = request.query_params.get("run_id"), request.query_params.get("profile_id")
        if run_id is None and everybody is None:
            raise FleetRefusal(400, "run_id or profile_id says which instances")
        chosen = [one for one in await self._places.list(owner) if run_id is None or one.make.run_id == run_id]
        closed = [await self._places.close(place) for place in chosen]
        return JSONResponse([self._tell(place, request) for place in closed])

    async def heartbeat(self, request: Request, owner: str) -> Response:
        place = await self._places.find(request.path_params["id"], owner)
        place = await self._places.heartbeat(place)
        answer = {
            "success": True,
            "instance_id": place.id,
            "last_heartbeat": rfc3339(place.last_heartbeat),
            "deadline_timestamp": place.deadline,
            "interval_seconds": place.make.heartbeat_interval,
        }
        return JSONResponse(answer)

    async def runs(self, request: Request, owner: str) -> Response:
        runs: dict[str, list[WorldInstance]] = {}
        for place in await self._places.list(owner, live=None):
            if place.make.run_id is not None:
                runs.setdefault(place.make.run_id, []).append(place)
        answer = [
            {
                "run_id": run_id,
                "running_count": sum(place.status == "running" for place in places),
                "total_count": len(places),
                "first_created_at": rfc3339(min(place.row.created_at for place in places)),
                "last_created_at": rfc3339(max(place.row.created_at for place in places)),
            }
            for run_id, places in runs.items()
        ]
        return JSONResponse(answer)

    async def environments(self, request: Request, owner: str) -> Response:
        return JSONResponse([self._environment(key) for key in self._places.catalog.versions])

    async def environment(self, request: Request, owner: str) -> Response:
        key = request.path_params["key"]
        if key not in self._places.catalog.versions:
            raise FleetRefusal(404, f"Environment '{key}' not found")
        return JSONResponse(self._environment(key))

    def _environment(self, key: str) -> dict[str, Any]:
        versions = self._places.catalog.versions[key]
        last = list(versions.values())[-1]
        return {
            "env_key": key,
            "name": last.name or key,
            "description": last.description,
            "default_version": f"v{last.version}",
            "versions": {f"v{version}": world.description or key for version, world in versions.items()},
        }

    async def regions(self, request: Request, owner: str) -> Response:
        return JSONResponse(list(REGIONS))

    async def account(self, request: Request, owner: str) -> Response:
        live, most = await self._places.count(owner)
        counts = {"instance_limit": most, "instance_count": live}
        return JSONResponse({"team_id": owner, "team_name": owner, **counts})

    def _tell(self, place: WorldInstance, request: Request) -> dict[str, Any]:
        return describe(place, str(request.base_url).rstrip("/"), self._guard.page_token(place.id))

    async def runner_token(self, request: Request, owner: str) -> Response:
        return JSONResponse({"token": self._guard.runner_token(owner)})


def describe(place: WorldInstance, base_url: str, page_token: str) -> dict[str, Any]:
    """An instance as clients read it. Its addresses are below the one that the request came to."""
    row, make = place.row, place.make
    root = f"{base_url}/i/{place.id}/"
    manager = f"{root}api/v1/env"
    return {
        "instance_id": place.id,
        "env_key": make.env_key,
        "version": f"v{place.world.version}",
        "status": place.status,
        "subdomain": place.id,
        "created_at": rfc3339(row.created_at),
        "updated_at": rfc3339(row.updated_at),
        "terminated_at": rfc3339(row.ended_at),
        "team_id": row.owner,
        "region": make.region or "local",
        "env_variables": make.env_variables,
        "data_key": make.data_key,
        "data_version": make.data_version,
        "run_id": make.run_id,
        "heartbeat_interval": make.heartbeat_interval,
        "health": place.status == "running",
        "urls": {
            "root": root,
            "app": [f"{base_url}/p/{page_token}/{place.id}/"],
            "health": f"{root}health",
            "manager": {
                "api": manager,
                "docs": f"{manager}/docs",
                "reset": f"{manager}/reset",
                "diff": f"{manager}/diff/structured",
                "snapshot": f"{manager}/snapshot",
                "execute_verifier_function": f"{manager}/execute_verifier_function",
                "execute_verifier_function_with_upload": f"{manager}/execute_verifier_function_with_upload",
            },
        },
    }
