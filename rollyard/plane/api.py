"""The native API. `ROUTES` is the one table behind the routing, the OpenAPI document and the authorisation test.

Handlers turn requests into calls of the hub and the instances and nothing else. Whether a role may use a route is decided
here, from the table; whether a caller may see an instance, in `access.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from rollyard.core.errors import Error, PlaneForbidden, PlaneInvalid, PlaneNotFound
from rollyard.core.plane import ApiKey, EnvSpec, Instance, Role
from rollyard.plane.access import NewKey, owner_for, sees
from rollyard.plane.engines import START_JOB
from rollyard.plane.openapi import Described, document
from rollyard.plane.parts import PlaneParts
from rollyard.plane.plans import CreateInstance
from rollyard.plane.pools import PutPool
from rollyard.plane.wire import (
    answer,
    body,
    env_json,
    happening_json,
    instance_json,
    key_json,
    number,
    pool_json,
    raw_body,
    refusal,
    rfc3339,
)

_log = structlog.get_logger("rollyard.plane")
MAX_FILE = 64 * 2**20
MAX_FORKS = 64
_A: tuple[Role, ...] = ("admin",)
_AO: tuple[Role, ...] = ("admin", "owner")
_AOT: tuple[Role, ...] = ("admin", "owner", "trainer")
_ALL: tuple[Role, ...] = ("admin", "owner", "trainer", "agent")


class CreateEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    version: str
    spec: EnvSpec = EnvSpec()


class UpdateEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: int
    spec: EnvSpec


class ReleaseEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: int | None = None


class Extend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttl_s: float


class DeleteMany(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ids: tuple[str, ...] = ()
    run_id: str | None = None
    labels: dict[str, str] = {}


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str | tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin_base64: str | None = None
    timeout_s: float = 60.0


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 1


class Presign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int
    minutes: float = 5.0


class OwnerTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; null means the server's default. A rate is creations a second."""

    quota: int | msgspec.UnsetType | None = msgspec.UNSET
    rate: float | msgspec.UnsetType | None = msgspec.UNSET


class Entry(NamedTuple):
    method: str
    path: str
    roles: tuple[Role, ...]
    handler: str
    what: str
    body: type | None = None


ROUTES: tuple[Entry, ...] = (
    Entry("GET", "/v1/engines", _ALL, "engines", "the engines and what each can do"),
    Entry("POST", "/v1/envs", _AO, "create_env", "describe a new environment version", CreateEnv),
    Entry("GET", "/v1/envs", _ALL, "list_envs", "a page of environments; q, status, limit, cursor"),
    Entry("GET", "/v1/envs/{name}/{version}", _ALL, "get_env", "one environment version"),
    Entry("PUT", "/v1/envs/{name}/{version}", _AO, "update_env", "replace it, at the revision read", UpdateEnv),
    Entry("DELETE", "/v1/envs/{name}/{version}", _AO, "delete_env", "remove a draft (an admin: any)"),
    Entry("GET", "/v1/envs/{name}/{version}/exists", _ALL, "env_exists", "whether it is there"),
    Entry("POST", "/v1/envs/{name}/{version}/release", _AO, "release_env", "make it immutable", ReleaseEnv),
    Entry("POST", "/v1/instances", _AOT, "create", "make an instance; honours Idempotency-Key", CreateInstance),
    Entry("GET", "/v1/instances", _AOT, "list", "a page of instances; env, run_id, label, live, limit, cursor"),
    Entry("POST", "/v1/instances/delete", _AOT, "delete_many", "delete by ids, run or labels", DeleteMany),
    Entry("GET", "/v1/instances/{id}", _ALL, "get", "a live instance"),
    Entry("DELETE", "/v1/instances/{id}", _AOT, "delete", "delete an instance"),
    Entry("GET", "/v1/instances/{id}/history", _ALL, "history", "its states, also when it is gone"),
    Entry("POST", "/v1/instances/{id}/heartbeat", _ALL, "heartbeat", "a sign of life"),
    Entry("POST", "/v1/instances/{id}/extend", _AOT, "extend", "a new end of its time", Extend),
    Entry("POST", "/v1/instances/{id}/pause", _AOT, "pause", "make its programs stand still"),
    Entry("POST", "/v1/instances/{id}/resume", _AOT, "resume", "let them go on"),
    Entry("POST", "/v1/instances/{id}/snapshot", _AOT, "snapshot", "an image of what it has written"),
    Entry("POST", "/v1/instances/{id}/fork", _AOT, "fork", "new instances that begin as this one is", Fork),
    Entry("GET", "/v1/instances/{id}/logs", _ALL, "logs", "what its own program printed; stream, tail, follow"),
    Entry("POST", "/v1/instances/{id}/exec", _ALL, "exec", "run a program and wait for it", Exec),
    Entry("GET", "/v1/instances/{id}/files", _ALL, "read_file", "a file's bytes; path"),
    Entry("PUT", "/v1/instances/{id}/files", _ALL, "write_file", "write a file from the body; path"),
    Entry("POST", "/v1/instances/{id}/presign", _AOT, "presign", "an expiring URL to a port", Presign),
    Entry("POST", "/v1/instances/{id}/token", _AOT, "token", "the token of its gateway, and of nothing else"),
    Entry("GET", "/v1/pools", _AOT, "list_pools", "warm pools and how many wait in them"),
    Entry("PUT", "/v1/pools/{name}", _A, "put_pool", "a pool of instances made ahead of their use", PutPool),
    Entry("DELETE", "/v1/pools/{name}", _A, "remove_pool", "end a pool and what waits in it"),
    Entry("GET", "/v1/usage", _AOT, "usage", "instances and quota of the caller's owner; owner"),
    Entry("PUT", "/v1/owners/{owner}", _A, "set_terms", "an owner's quota and rate", OwnerTerms),
    Entry("POST", "/v1/keys", _A, "create_key", "a new API key, shown once", NewKey),
    Entry("GET", "/v1/keys", _A, "list_keys", "keys, without themselves"),
    Entry("DELETE", "/v1/keys/{id}", _A, "revoke_key", "end a key"),
    Entry("POST", "/v1/sweep", _A, "sweep", "sweep now"),
)


def plane_app(parts: PlaneParts, *, page: ASGIApp | None = None, public_url: str | None = None) -> Starlette:
    api = _Api(parts, public_url)
    described = document([Described(e.method, e.path, e.handler, e.what, e.roles, e.body) for e in ROUTES])

    async def health(request: Request) -> Response:
        return answer({"status": "ok", "engines": list(parts.instances.engines)})

    async def openapi(request: Request) -> Response:
        return answer(described)

    routes: list[BaseRoute] = [Route("/health", health), Route("/openapi.json", openapi)]
    routes += [Route(e.path, _guarded(api, e), methods=[e.method]) for e in ROUTES]
    routes += parts.gateway.routes()
    if page is not None:
        routes.append(Mount("/page", page))
    return Starlette(routes=routes, exception_handlers={HTTPException: _http, Exception: _broken})


def _guarded(api: _Api, entry: Entry) -> Callable[[Request], Awaitable[Response]]:
    handler: Callable[[Request, ApiKey], Awaitable[Response]] = getattr(api, entry.handler)

    async def endpoint(request: Request) -> Response:
        try:
            caller = await api.access.caller(request.headers.get("authorization"))
            if caller.role not in entry.roles:
                raise PlaneForbidden(
                    f"a key of role {caller.role} may not do this", hint=f"needs {', '.join(entry.roles)}"
                )
            return await handler(request, caller)
        except Error as error:
            return refusal(error)

    return endpoint


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    told = {"code": "no_route" if status in (404, 405) else "http", "message": str(getattr(error, "detail", ""))}
    return answer({"error": told}, status)


async def _broken(request: Request, error: Exception) -> Response:
    _log.error("a request failed", path=request.url.path, exc_info=error)
    return answer({"error": {"code": "internal", "message": "the server failed; its log says why"}}, 500)


class _Api:
    def __init__(self, parts: PlaneParts, public_url: str | None) -> None:
        self._store, self._hub, self._instances, self._sweeper = parts.store, parts.hub, parts.instances, parts.sweeper
        self.access, self._gateway, self._pools, self._public_url = parts.access, parts.gateway, parts.pools, public_url

    async def engines(self, request: Request, caller: ApiKey) -> Response:
        return answer({name: engine.abilities for name, engine in self._instances.engines.items()})

    # environments

    async def create_env(self, request: Request, caller: ApiKey) -> Response:
        new = await body(request, CreateEnv)
        return answer(env_json(await self._hub.create(new.name, new.version, new.spec)), 201)

    async def list_envs(self, request: Request, caller: ApiKey) -> Response:
        query = request.query_params
        found, cursor = await self._hub.page(
            search=query.get("q", ""),
            status=query.get("status"),
            cursor=query.get("cursor"),
            limit=number(request, "limit", 50),
        )
        return answer({"items": [env_json(record) for record in found], "next": cursor})

    async def get_env(self, request: Request, caller: ApiKey) -> Response:
        return answer(env_json(await self._hub.get(**request.path_params)))

    async def update_env(self, request: Request, caller: ApiKey) -> Response:
        new = await body(request, UpdateEnv)
        return answer(env_json(await self._hub.update(**request.path_params, spec=new.spec, revision=new.revision)))

    async def delete_env(self, request: Request, caller: ApiKey) -> Response:
        await self._hub.delete(**request.path_params, released=caller.role == "admin")
        return Response(status_code=204)

    async def env_exists(self, request: Request, caller: ApiKey) -> Response:
        return answer({"exists": await self._hub.exists(**request.path_params)})

    async def release_env(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, ReleaseEnv)
        return answer(env_json(await self._hub.release(**request.path_params, revision=asked.revision)))

    # instances

    async def create(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, CreateInstance)
        owner = owner_for(caller, asked.owner)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 200:
            raise PlaneInvalid("an Idempotency-Key has 1 to 200 characters")
        made = await self._instances.create(asked, owner=owner, caller=caller.id, key=key)
        return answer({**instance_json(made), "token": self._gateway.token(made.id)}, 201)

    async def list(self, request: Request, caller: ApiKey) -> Response:
        query = request.query_params
        owner = query.get("owner") if caller.role == "admin" else owner_for(caller, query.get("owner"))
        found, cursor = await self._instances.page(
            owner=owner,
            env=query.get("env"),
            run_id=query.get("run_id"),
            labels=_labels(query.getlist("label")),
            live={"true": True, "false": False, "any": None}.get(query.get("live", "true"), True),
            cursor=query.get("cursor"),
            limit=number(request, "limit", 50),
        )
        return answer({"items": [instance_json(instance) for instance in found], "next": cursor})

    async def _own(self, request: Request, caller: ApiKey) -> Instance:
        found = await self._instances.record(request.path_params["id"])
        sees(caller, found)
        return found

    async def get(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        return answer(instance_json(await self._instances.get(own.id)))

    async def delete(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        await self._instances.delete(own.id)
        return Response(status_code=204)

    async def delete_many(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, DeleteMany)
        owner = None if caller.role == "admin" else caller.owner
        ids: list[str] = []
        outcomes: dict[str, str] = {}
        for instance_id in asked.ids:
            try:
                sees(caller, await self._instances.record(instance_id))
                ids.append(instance_id)
            except PlaneNotFound:
                outcomes[instance_id] = "not_found"
        if asked.run_id is not None or asked.labels:
            cursor = None
            while True:
                found, cursor = await self._instances.page(
                    owner=owner, run_id=asked.run_id, labels=asked.labels, cursor=cursor, limit=500
                )
                ids += [instance.id for instance in found]
                if cursor is None:
                    break
        elif not asked.ids:
            raise PlaneInvalid("say which: ids, run_id or labels")
        return answer({"outcomes": outcomes | await self._instances.delete_many(ids)})

    async def history(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        lines = await self._instances.history(own.id)
        return answer({"instance": instance_json(own), "history": [happening_json(line) for line in lines]})

    async def heartbeat(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        return answer(instance_json(await self._instances.heartbeat(own.id)))

    async def extend(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        asked = await body(request, Extend)
        return answer(instance_json(await self._instances.extend(own.id, asked.ttl_s)))

    async def pause(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        return answer(instance_json(await self._instances.pause(own.id)))

    async def resume(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        return answer(instance_json(await self._instances.resume(own.id)))

    async def snapshot(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        return answer({"image": await self._instances.snapshot(own.id)}, 201)

    async def fork(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        asked = await body(request, Fork)
        if not 1 <= asked.count <= MAX_FORKS:
            raise PlaneInvalid(f"count is from 1 to {MAX_FORKS}")
        made = await self._instances.fork(own.id, asked.count)
        return answer({"items": [{**instance_json(one), "token": self._gateway.token(one.id)} for one in made]}, 201)

    async def logs(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        if not own.plan.start:
            raise PlaneNotFound(f"instance {own.id} has no program of its own", hint="create it with start")
        query = request.query_params
        errors = query.get("stream", "stdout") == "stderr"
        job = await (await self._instances.sandbox(own.id)).job(START_JOB)
        if query.get("follow") == "true":
            lines = (part async for _, part in job.stream(stderr=errors))
            return StreamingResponse(lines, media_type="text/plain")
        data = await job.tail(min(number(request, "tail", 65536), MAX_FILE), stderr=errors)
        return Response(data, media_type="text/plain")

    async def exec(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        asked = await body(request, Exec)
        if not 0 < asked.timeout_s <= 3600:
            raise PlaneInvalid("timeout_s is above 0 and at most 3600")
        sandbox = await self._instances.sandbox(own.id)
        stdin = None if asked.stdin_base64 is None else _bytes(asked.stdin_base64)
        done = await sandbox.exec(
            asked.command, env=asked.env, cwd=asked.cwd, stdin=stdin, timeout=asked.timeout_s, max_output=4 * 2**20
        )
        return answer(msgspec.structs.asdict(done))  # bytes become base64

    async def read_file(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        sandbox = await self._instances.sandbox(own.id, "files")
        data = await sandbox.read(_path(request), max_bytes=MAX_FILE)
        return Response(data, media_type="application/octet-stream")

    async def write_file(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        path = _path(request)
        data = await raw_body(request, MAX_FILE)
        await (await self._instances.sandbox(own.id, "files")).write(path, data)
        return Response(status_code=204)

    async def presign(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        asked = await body(request, Presign)
        base_url = self._public_url or str(request.base_url)
        url, ends = await self._gateway.presign(own.id, asked.port, asked.minutes, base_url=base_url)
        return answer({"url": url, "expires_at": rfc3339(ends)})

    async def token(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        await self._instances.running(own.id)
        return answer({"token": self._gateway.token(own.id)})

    # pools, owners, keys, the sweep

    async def list_pools(self, request: Request, caller: ApiKey) -> Response:
        return answer({"items": [pool_json(pool, live) for pool, live in await self._pools.page()]})

    async def put_pool(self, request: Request, caller: ApiKey) -> Response:
        pool = await self._pools.put(request.path_params["name"], await body(request, PutPool))
        return answer(pool_json(pool, None))

    async def remove_pool(self, request: Request, caller: ApiKey) -> Response:
        await self._pools.remove(request.path_params["name"])
        return Response(status_code=204)

    async def usage(self, request: Request, caller: ApiKey) -> Response:
        usage = await self._store.usage(owner_for(caller, request.query_params.get("owner")))
        default = self._instances.settings.terms.quota
        return answer({**msgspec.to_builtins(usage), "limit": default if usage.quota is None else usage.quota})

    async def set_terms(self, request: Request, caller: ApiKey) -> Response:
        asked = await body(request, OwnerTerms)
        terms = {k: v for k, v in msgspec.structs.asdict(asked).items() if v is not msgspec.UNSET}
        if not terms:
            raise PlaneInvalid("give a quota or a rate")
        if any(value is not None and not 0 <= value < 2**31 for value in terms.values()):
            raise PlaneInvalid("a quota and a rate are numbers from 0, or null for the server's default")
        return answer(await self._store.set_terms(request.path_params["owner"], **terms))

    async def create_key(self, request: Request, caller: ApiKey) -> Response:
        key, text = await self.access.issue(await body(request, NewKey))
        return answer({**key_json(key), "key": text}, 201)

    async def list_keys(self, request: Request, caller: ApiKey) -> Response:
        return answer({"items": [key_json(key) for key in await self._store.list_keys()]})

    async def revoke_key(self, request: Request, caller: ApiKey) -> Response:
        await self.access.revoke(request.path_params["id"])
        return Response(status_code=204)

    async def sweep(self, request: Request, caller: ApiKey) -> Response:
        return answer(await self._sweeper.once())


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path.startswith("/") or "\0" in path:
        raise PlaneInvalid("path is an absolute path in the instance")
    return path


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PlaneInvalid("stdin_base64 is not base64") from error


def _labels(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if not all(separator for _, separator, _ in pairs):
        raise PlaneInvalid("label is name=value")
    return {name: value for name, _, value in pairs}
