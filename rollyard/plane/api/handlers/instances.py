"""Requests about instances, turned into calls of `Instances` and the gateway. Each asks first whether the caller may
see the instance."""

from __future__ import annotations

import base64

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollyard.core.errors import PlaneInvalid, PlaneNotFound
from rollyard.core.plane import Instance
from rollyard.plane.api.handlers.call import ApiCall
from rollyard.plane.api.handlers.watching import read_wait
from rollyard.plane.engines.protocol import START_JOB
from rollyard.plane.http.wire import answer, body, number, raw_body
from rollyard.plane.service.access import check_visible, owner_for
from rollyard.plane.service.create_request import CreateInstance
from rollyard.plane.service.shapes import instance_event_json, instance_json, rfc3339
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


async def create_instance(call: ApiCall) -> Response:
    wanted = await body(call.request, CreateInstance)
    owner = owner_for(call.caller, wanted.owner)
    key = call.request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= 200:
        raise PlaneInvalid("an Idempotency-Key has 1 to 200 characters")
    made = await call.parts.instances.create(wanted, owner=owner, caller=call.caller.id, key=key)
    return answer({**instance_json(made), "token": call.parts.gateway.token(made.id)}, 201)


async def list_instances(call: ApiCall) -> Response:
    query = call.request.query_params
    owner = query.get("owner") if call.caller.role == "admin" else owner_for(call.caller, query.get("owner"))
    found, cursor = await call.parts.instances.page(
        owner=owner,
        env=query.get("env"),
        run_id=query.get("run_id"),
        rollout_id=query.get("rollout_id"),
        labels=_labels(query.getlist("label")),
        live=_parse_live(query.get("live", "true")),
        cursor=query.get("cursor"),
        limit=number(call.request, "limit", 50),
    )
    return answer({"items": [instance_json(instance) for instance in found], "next": cursor})


async def _find_own(call: ApiCall) -> Instance:
    found = await call.parts.instances.record(call.request.path_params["id"])
    check_visible(call.caller, found)
    return found


async def get_instance(call: ApiCall) -> Response:
    own = await _find_own(call)
    state = call.request.query_params.get("not")
    if state is None:
        return answer(instance_json(await call.parts.instances.get(own.id)))
    found = await until_not(
        lambda: call.parts.instances.record(own.id), state, read_wait(call.request), call.parts.drain.stopping
    )
    return answer(instance_json(found))


async def link_rollout(call: ApiCall) -> Response:
    own = await _find_own(call)
    wanted = await body(call.request, RolloutLink)
    if not 0 < len(wanted.rollout_id) <= 200:
        raise PlaneInvalid("a rollout's id has 1 to 200 characters")
    return answer(instance_json(await call.parts.instances.link(own.id, wanted.rollout_id)))


async def delete_instance(call: ApiCall) -> Response:
    own = await _find_own(call)
    await call.parts.instances.delete(own.id)
    return Response(status_code=204)


async def delete_instances(call: ApiCall) -> Response:
    wanted = await body(call.request, DeleteMany)
    owner = None if call.caller.role == "admin" else call.caller.owner
    ids: list[str] = []
    outcomes: dict[str, str] = {}
    for instance_id in wanted.ids:
        try:
            check_visible(call.caller, await call.parts.instances.record(instance_id))
            ids.append(instance_id)
        except PlaneNotFound:
            outcomes[instance_id] = "not_found"
    if wanted.run_id is not None or wanted.labels:
        found = call.parts.instances.all(owner=owner, run_id=wanted.run_id, labels=wanted.labels)
        ids += [instance.id async for instance in found]
    elif not wanted.ids:
        raise PlaneInvalid("say which: ids, run_id or labels")
    return answer({"outcomes": outcomes | await call.parts.instances.delete_many(ids)})


async def get_history(call: ApiCall) -> Response:
    own = await _find_own(call)
    lines = await call.parts.instances.history(own.id)
    return answer({"instance": instance_json(own), "history": [instance_event_json(line) for line in lines]})


async def heartbeat(call: ApiCall) -> Response:
    own = await _find_own(call)
    return answer(instance_json(await call.parts.instances.heartbeat(own.id)))


async def extend(call: ApiCall) -> Response:
    own = await _find_own(call)
    wanted = await body(call.request, Extend)
    return answer(instance_json(await call.parts.instances.extend(own.id, wanted.ttl_s)))


async def pause(call: ApiCall) -> Response:
    own = await _find_own(call)
    return answer(instance_json(await call.parts.instances.pause(own.id)))


async def resume(call: ApiCall) -> Response:
    own = await _find_own(call)
    return answer(instance_json(await call.parts.instances.resume(own.id)))


async def snapshot(call: ApiCall) -> Response:
    own = await _find_own(call)
    return answer({"image": await call.parts.instances.snapshot(own.id)}, 201)


async def fork(call: ApiCall) -> Response:
    own = await _find_own(call)
    wanted = await body(call.request, Fork)
    if not 1 <= wanted.count <= MAX_FORKS:
        raise PlaneInvalid(f"count is from 1 to {MAX_FORKS}")
    made = await call.parts.instances.fork(own.id, wanted.count)
    return answer({"items": [{**instance_json(one), "token": call.parts.gateway.token(one.id)} for one in made]}, 201)


async def read_logs(call: ApiCall) -> Response:
    own = await _find_own(call)
    if not own.plan.start:
        raise PlaneNotFound(f"instance {own.id} has no program of its own", hint="create it with start")
    query = call.request.query_params
    errors = query.get("stream", "stdout") == "stderr"
    job = await (await call.parts.instances.sandbox(own.id)).job(START_JOB)
    if query.get("follow") == "true":
        lines = (part async for _, part in job.stream(stderr=errors))
        return StreamingResponse(lines, media_type="text/plain")
    data = await job.tail(min(number(call.request, "tail", 65536), MAX_FILE), stderr=errors)
    return Response(data, media_type="text/plain")


async def run_program(call: ApiCall) -> Response:
    own = await _find_own(call)
    wanted = await body(call.request, Exec)
    if not 0 < wanted.timeout_s <= 3600:
        raise PlaneInvalid("timeout_s is above 0 and at most 3600")
    sandbox = await call.parts.instances.sandbox(own.id)
    stdin = None if wanted.stdin_base64 is None else _bytes(wanted.stdin_base64)
    done = await sandbox.exec(
        wanted.command, env=wanted.env, cwd=wanted.cwd, stdin=stdin, timeout=wanted.timeout_s, max_output=4 * 2**20
    )
    return answer(msgspec.structs.asdict(done))  # bytes become base64


async def read_file(call: ApiCall) -> Response:
    own = await _find_own(call)
    sandbox = await call.parts.instances.sandbox(own.id, "files")
    data = await sandbox.read(_path(call.request), max_bytes=MAX_FILE)
    return Response(data, media_type="application/octet-stream")


async def write_file(call: ApiCall) -> Response:
    own = await _find_own(call)
    path = _path(call.request)
    data = await raw_body(call.request, MAX_FILE)
    await (await call.parts.instances.sandbox(own.id, "files")).write(path, data)
    return Response(status_code=204)


async def presign(call: ApiCall) -> Response:
    own = await _find_own(call)
    wanted = await body(call.request, Presign)
    url, ends = await call.parts.gateway.presign(own.id, wanted.port, wanted.minutes, base_url=call.base_url)
    return answer({"url": url, "expires_at": rfc3339(ends)})


async def get_token(call: ApiCall) -> Response:
    own = await _find_own(call)
    await call.parts.instances.running(own.id)
    return answer({"token": call.parts.gateway.token(own.id)})


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path.startswith("/") or "\0" in path:
        raise PlaneInvalid("path is an absolute path in the instance")
    return path


def _parse_live(text: str) -> bool | None:
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
