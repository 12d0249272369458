"""Requests about environments, turned into calls of the hub."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from rollyard.core.errors import PlaneNotFound
from rollyard.core.plane import EnvSpec
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.http.wire import answer, body, number
from rollyard.plane.service.access import check_may_change, owner_for, show_env
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


async def create_env(call: ApiCall) -> Response:
    new = await body(call.request, CreateEnv)
    owner = owner_for(call.caller, new.owner)
    made = await call.parts.hub.create(new.name, new.version, new.spec, by=call.caller, owner=owner)
    return answer(env_json(made), 201)


async def list_envs(call: ApiCall) -> Response:
    query = call.request.query_params
    found, cursor = await call.parts.hub.page(
        search=query.get("q", ""),
        status=query.get("status"),
        cursor=query.get("cursor"),
        limit=number(call.request, "limit", 50),
    )
    return answer({"items": [env_json(show_env(call.caller, record)) for record in found], "next": cursor})


async def get_env(call: ApiCall) -> Response:
    return answer(env_json(show_env(call.caller, await call.parts.hub.get(**call.request.path_params))))


async def update_env(call: ApiCall) -> Response:
    new = await body(call.request, UpdateEnv)
    changed = await call.parts.hub.update(
        **call.request.path_params, spec=new.spec, revision=new.revision, by=call.caller
    )
    return answer(env_json(changed))


async def delete_env(call: ApiCall) -> Response:
    await call.parts.hub.delete(**call.request.path_params, by=call.caller)
    return Response(status_code=204)


async def env_exists(call: ApiCall) -> Response:
    return answer({"exists": await call.parts.hub.exists(**call.request.path_params)})


async def list_builds(call: ApiCall) -> Response:
    record = await call.parts.hub.get(**call.request.path_params)
    check_may_change(call.caller, record)
    found, build = dict[str, Any](), record.spec.build
    for engine in call.parts.instances.engines:
        done = await call.parts.builds.find(engine, record.owner, build) if build is not None else None
        if done is not None:
            found[engine] = {"image": done.image, "start": done.start, "log": done.log, "seconds": done.seconds}
    return answer(found)


async def build_output(call: ApiCall) -> Response:
    """All that the build on one engine printed, as text."""
    path = call.request.path_params
    record = await call.parts.hub.get(path["name"], path["version"])
    check_may_change(call.caller, record)
    build = record.spec.build
    done = await call.parts.builds.find(path["engine"], record.owner, build) if build is not None else None
    if done is None:
        raise PlaneNotFound(f"{record.id} was not built on {path['engine']}")
    return Response(await call.parts.builds.output(done), media_type="text/plain; charset=utf-8")


async def release_env(call: ApiCall) -> Response:
    wanted = await body(call.request, ReleaseEnv)
    return answer(
        env_json(await call.parts.hub.release(**call.request.path_params, revision=wanted.revision, by=call.caller))
    )
