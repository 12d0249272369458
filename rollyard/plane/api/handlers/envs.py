"""Requests about environments, turned into calls of the hub."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.plane import ApiKey, EnvSpec
from rollyard.plane.http.wire import answer, body, number
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import owner_for, show_env
from rollyard.plane.service.shapes import env_json


class CreateEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    version: str
    spec: EnvSpec = EnvSpec()
    owner: str | None = None


class UpdateEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: int
    spec: EnvSpec


class ReleaseEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: int | None = None


class EnvHandlers:
    def __init__(self, parts: PlaneParts) -> None:
        self._hub = parts.hub

    async def create(self, request: Request, caller: ApiKey) -> Response:
        new = await body(request, CreateEnv)
        owner = owner_for(caller, new.owner)
        made = await self._hub.create(new.name, new.version, new.spec, by=caller, owner=owner)
        return answer(env_json(made), 201)

    async def list(self, request: Request, caller: ApiKey) -> Response:
        query = request.query_params
        found, cursor = await self._hub.page(
            search=query.get("q", ""),
            status=query.get("status"),
            cursor=query.get("cursor"),
            limit=number(request, "limit", 50),
        )
        return answer({"items": [env_json(show_env(caller, record)) for record in found], "next": cursor})

    async def get(self, request: Request, caller: ApiKey) -> Response:
        return answer(env_json(show_env(caller, await self._hub.get(**request.path_params))))

    async def update(self, request: Request, caller: ApiKey) -> Response:
        new = await body(request, UpdateEnv)
        changed = await self._hub.update(**request.path_params, spec=new.spec, revision=new.revision, by=caller)
        return answer(env_json(changed))

    async def delete(self, request: Request, caller: ApiKey) -> Response:
        await self._hub.delete(**request.path_params, by=caller)
        return Response(status_code=204)

    async def exists(self, request: Request, caller: ApiKey) -> Response:
        return answer({"exists": await self._hub.exists(**request.path_params)})

    async def release(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, ReleaseEnv)
        return answer(env_json(await self._hub.release(**request.path_params, revision=asked.revision, by=caller)))
