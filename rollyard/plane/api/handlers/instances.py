"""Requests about instances, turned into calls of `Instances` and the gateway. Each asks first whether the caller may
see the instance."""

from __future__ import annotations

import base64

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollyard.core.errors import PlaneInvalid, PlaneNotFound
from rollyard.core.plane import ApiKey, Instance
from rollyard.plane.api.handlers.watching import waiting
from rollyard.plane.engines.protocol import START_JOB
from rollyard.plane.http.wire import answer, body, number, raw_body
from rollyard.plane.parts import PlaneParts
from rollyard.plane.service.access import owner_for, sees
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.shapes import happening_json, instance_json, rfc3339
from rollyard.plane.service.watch import until_not

MAX_FILE = 64 * 2**20
MAX_FORKS = 64


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


class RolloutLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rollout_id: str


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 1


class Presign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int
    minutes: float = 5.0


class InstanceHandlers:
    def __init__(self, parts: PlaneParts, public_url: str | None) -> None:
        self._instances, self._gateway, self._duty = parts.instances, parts.gateway, parts.duty
        self._public_url = public_url

    async def create(self, request: Request, caller: ApiKey) -> Response:
        self._duty.refuse()
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
            rollout_id=query.get("rollout_id"),
            labels=_labels(query.getlist("label")),
            live=_live(query.get("live", "true")),
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
        state = request.query_params.get("not")
        if state is None:
            return answer(instance_json(await self._instances.get(own.id)))
        found = await until_not(lambda: self._instances.record(own.id), state, waiting(request), self._duty.over)
        return answer(instance_json(found))

    async def link(self, request: Request, caller: ApiKey) -> Response:
        own = await self._own(request, caller)
        asked = await body(request, RolloutLink)
        if not 0 < len(asked.rollout_id) <= 200:
            raise PlaneInvalid("a rollout's id has 1 to 200 characters")
        return answer(instance_json(await self._instances.link(own.id, asked.rollout_id)))

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
            found = self._instances.all(owner=owner, run_id=asked.run_id, labels=asked.labels)
            ids += [instance.id async for instance in found]
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
        self._duty.refuse()
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


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path.startswith("/") or "\0" in path:
        raise PlaneInvalid("path is an absolute path in the instance")
    return path


def _live(text: str) -> bool | None:
    if text not in ("true", "false", "any"):
        raise PlaneInvalid("live is true, false or any")
    return None if text == "any" else text == "true"


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
