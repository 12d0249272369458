"""Prime's API and its gateway, as far as the SDK uses them, over any backend.

Paths and bodies of `/sandbox...`, its checkpoints among them, are those that `prime_sandboxes/sandbox.py` (0.5.1) asks for, with
`models.py`; the gateway's commands are the messages in `_proto`, its files those of `upload_bytes` and `download_file` there.

Commands come as Connect streams of binary messages; the messages are the SDK's. `HOME` is elsewhere meanwhile: the SDK keeps
sandboxes' tokens there.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import struct
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollyard.core.errors import Error, PathError, SandboxGone
from rollyard.core.sandbox import SandboxSpec
from tests.sandbox.running import ran

KEY = "pit_" + "c0ffee" * 8
KNOWN_IMAGES = {"python:3.12", "debian:12"}
LIVE, DEAD = "RUNNING", "TERMINATED"


def options(url, key):
    """Of a prime backend that is to use this server."""
    return {"key": key, "url": url, "isolation": "namespace"}


class Made:
    def __init__(self, sandbox, asked):
        self.sandbox, self.asked = sandbox, asked
        self.id = uuid.uuid4().hex
        self.token = secrets.token_hex(16)
        self.created = datetime.now(UTC)
        self.status = LIVE
        self.used = time.monotonic()


class Server:
    def __init__(self, backend, *, key=KEY, spec=None):
        self.backend, self.key, self.spec = backend, key, spec or SandboxSpec(ttl_s=7200, lifetime="ttl")
        self.url = ""
        self.made, self.by_key, self.checkpoints, self.uploaded = {}, {}, {}, 0
        api, gate = "/api/v1/sandbox", "/gateway/ns/{id}"
        self.app = Starlette(
            routes=[
                Route(api, self._guarded(self.create), methods=["POST"]),
                Route(api, self._guarded(self.list)),
                Route(api, self._guarded(self.bulk_delete), methods=["DELETE"]),
                Route(f"{api}/status:batchGet", self._guarded(self.statuses), methods=["POST"]),
                Route(f"{api}/checkpoints:batchGet", self._guarded(self.get_checkpoints), methods=["POST"]),
                Route(f"{api}/checkpoints/{{checkpoint}}", self._guarded(self.get_checkpoint)),
                Route(f"{api}/checkpoints/{{checkpoint}}", self._guarded(self.delete_checkpoint), methods=["DELETE"]),
                Route(f"{api}/{{id}}/checkpoints", self._guarded(self.checkpoint), methods=["POST"]),
                Route(f"{api}/{{id}}", self._guarded(self.get)),
                Route(f"{api}/{{id}}", self._guarded(self.delete), methods=["DELETE"]),
                Route(f"{api}/{{id}}/auth", self._guarded(self.auth), methods=["POST"]),
                Route(f"{api}/{{id}}/error-context", self._guarded(self.context)),
                Route(f"{gate}/command_session.CommandSession/Start", self.start, methods=["POST"]),
                Route(f"{gate}/upload", self.upload, methods=["POST"]),
                Route(f"{gate}/download", self.download),
            ]
        )

    @property
    def options(self):
        return options(self.url, self.key)

    @property
    def live(self):
        return self.made.values()

    def _guarded(self, endpoint):
        async def answer(request):
            if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {self.key}"):
                return JSONResponse({"detail": "Invalid API key"}, 401)
            if "id" not in request.path_params:
                return await endpoint(request)
            made = self.made.get(request.path_params["id"])
            if made is None:
                return JSONResponse({"detail": "Sandbox not found"}, 404)
            return await endpoint(request, made)

        return answer

    def told(self, made):
        asked, moment = made.asked, made.created.isoformat()
        return {
            "id": made.id,
            "name": asked["name"],
            "dockerImage": asked.get("docker_image") or "python:3.12",
            "cpuCores": asked["cpu_cores"],
            "memoryGB": asked["memory_gb"],
            "diskSizeGB": asked.get("disk_size_gb") or 5,
            "diskMountPath": "/",
            "gpuCount": 0,
            "vm": True,
            "networkAllowlist": asked.get("network_allowlist"),
            "status": made.status,
            "timeoutMinutes": asked["timeout_minutes"],
            "idleTimeoutMinutes": asked.get("idle_timeout_minutes"),
            "labels": asked["labels"],
            "createdAt": moment,
            "updatedAt": moment,
        }

    def _auth(self, made):
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        way = {"gateway_url": f"{self.url}/gateway", "user_ns": "ns", "job_id": made.id}
        return {**way, "token": made.token, "expires_at": later}

    async def create(self, request):
        asked = json.loads(await request.body())
        kept = self.checkpoints.get(asked.get("checkpoint_id"))
        if asked.get("checkpoint_id") and kept is None:
            return JSONResponse({"detail": "Checkpoint not found"}, 404)
        if kept is None and asked["docker_image"] not in KNOWN_IMAGES:
            return JSONResponse({"detail": f"image {asked['docker_image']} cannot be pulled"}, 422)
        made = self.by_key.get(asked["idempotency_key"])
        if made is None:
            spec = msgspec.structs.replace(self.spec, env=asked.get("environment_vars") or {})
            if kept is not None:
                spec = msgspec.structs.replace(spec, image=kept)
            made = self.by_key[asked["idempotency_key"]] = Made(await self.backend.open(spec), asked)
            self.made[made.id] = made
            made.watch = asyncio.create_task(self._timers(made))
        return JSONResponse({**self.told(made), "gatewayAuth": self._auth(made)})

    async def _timers(self, made):
        end = time.monotonic() + 60 * made.asked["timeout_minutes"]
        idle = 60 * made.asked.get("idle_timeout_minutes", 1e6)
        while made.status == LIVE and time.monotonic() < min(end, made.used + idle):
            await asyncio.sleep(0.2)
        await self._end(made)

    async def _end(self, made):
        if made.status == LIVE:
            made.status = DEAD
            await made.sandbox.kill()

    async def list(self, request):
        wanted, page = set(request.query_params.getlist("labels")), int(request.query_params["page"])
        live = request.query_params.get("is_active") == "true"
        found = [
            self.told(made)
            for made in self.made.values()
            if wanted <= set(made.asked["labels"]) and (not live or made.status == LIVE)
        ]
        size = 2
        part, more = found[(page - 1) * size : page * size], page * size < len(found)
        return JSONResponse({"sandboxes": part, "total": len(found), "page": page, "perPage": size, "hasNext": more})

    async def get(self, request, made):
        return JSONResponse(self.told(made))

    async def statuses(self, request):
        asked = json.loads(await request.body())["sandbox_ids"]
        known = [{"sandbox_id": name, "status": self.made[name].status} for name in asked if name in self.made]
        return JSONResponse({"statuses": known, "errors": []})

    async def delete(self, request, made):
        await self._end(made)
        return JSONResponse({})

    async def bulk_delete(self, request):
        asked = json.loads(await request.body())["sandbox_ids"]
        failed = [{"sandbox_id": name, "error": "Sandbox not found"} for name in asked if name not in self.made]
        for name in asked:
            if name in self.made:
                await self._end(self.made[name])
        done = [name for name in asked if name in self.made]
        return JSONResponse({"succeeded": done, "failed": failed, "message": "ok"})

    async def auth(self, request, made):
        if made.status != LIVE:
            return JSONResponse({"detail": "Sandbox not found"}, 404)
        return JSONResponse(self._auth(made))

    async def context(self, request, made):
        return JSONResponse({"status": made.status})

    async def checkpoint(self, request, made):
        name = uuid.uuid4().hex
        self.checkpoints[name] = await made.sandbox.snapshot()
        return JSONResponse(self.told_checkpoint(name))

    def told_checkpoint(self, name):
        moment = datetime.now(UTC).isoformat()
        where = {"id": name, "sandbox_id": "any", "docker_image": "python:3.12", "depth": 0, "state": "DURABLE"}
        return {**where, "created_at": moment, "updated_at": moment}

    async def get_checkpoint(self, request):
        name = request.path_params["checkpoint"]
        if name not in self.checkpoints:
            return JSONResponse({"detail": "Checkpoint not found"}, 404)
        return JSONResponse(self.told_checkpoint(name))

    async def get_checkpoints(self, request):
        asked = json.loads(await request.body())["checkpoint_ids"]
        found = [self.told_checkpoint(name) for name in asked if name in self.checkpoints]
        lost = [name for name in asked if name not in self.checkpoints]
        errors = [{"checkpoint_id": name, "code": "NOT_FOUND", "message": "not found"} for name in lost]
        return JSONResponse({"checkpoints": found, "errors": errors})

    async def delete_checkpoint(self, request):
        await self.backend.images.remove(self.checkpoints.pop(request.path_params["checkpoint"]))
        return JSONResponse({})

    # the gateway

    def _served(self, request):
        made = self.made.get(request.path_params["id"])
        if made is None or made.status != LIVE:
            return None
        if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {made.token}"):
            return None
        made.used = time.monotonic()
        return made

    async def start(self, request):
        from prime_sandboxes._proto.command_session import command_session_pb2 as messages

        made, body = self._served(request), await request.body()
        if made is None:
            return StreamingResponse(_refusal("not_found", "no such sandbox"), media_type="application/connect+proto")
        asked = messages.StartRequest.FromString(body[5:])
        limit = float(request.headers.get("connect-timeout-ms", 300_000)) / 1000
        return StreamingResponse(self._events(messages, made, asked, limit), media_type="application/connect+proto")

    async def _events(self, messages, made, asked, limit):
        def event(**fields):
            reply = messages.StartResponse(event=messages.CommandSessionEvent(**fields)).SerializeToString()
            return struct.pack(">BI", 0, len(reply)) + reply

        kinds = messages.CommandSessionEvent
        yield event(start=kinds.StartEvent(pid=1))
        command = asked.command
        try:
            argv, env = [command.cmd, *command.args], dict(command.envs)
            done = await ran(made.sandbox, argv, env=env, cwd=command.cwd or None, timeout=limit)
        except SandboxGone:
            async for part in _refusal("not_found", "no such sandbox"):
                yield part
            return
        except Error as error:
            async for part in _refusal("invalid_argument", type(error).__name__):
                yield part
            return
        if done.timed_out:
            async for part in _refusal("deadline_exceeded", "the command ran past its timeout"):
                yield part
            return
        for name, data in (("stdout", done.stdout), ("stderr", done.stderr)):
            for at in range(0, len(data), 2**16):
                yield event(data=kinds.DataEvent(**{name: data[at : at + 2**16]}))
        yield event(end=kinds.EndEvent(exit_code=done.exit_code if done.exit_code is not None else -1, exited=True))
        yield struct.pack(">BI", 2, 2) + b"{}"

    async def upload(self, request):
        made = self._served(request)
        if made is None:
            return JSONResponse({"error": "sandbox_terminated"}, 410)
        async with request.form(max_part_size=2**30) as form:
            data = await form["file"].read()
        path = request.query_params["path"]
        try:
            await made.sandbox.write(path, data)
        except PathError as error:
            return JSONResponse({"detail": str(error)}, 400)
        moment = datetime.now(UTC).isoformat()
        return JSONResponse({"success": True, "path": path, "size": len(data), "timestamp": moment})

    async def download(self, request):
        made = self._served(request)
        if made is None:
            return JSONResponse({"error": "sandbox_terminated"}, 410)
        try:
            return Response(await made.sandbox.read(request.query_params["path"], max_bytes=2**30))
        except PathError as error:
            return JSONResponse({"detail": str(error)}, 404)


async def _refusal(code, message):
    told = json.dumps({"error": {"code": code, "message": message}}).encode()
    yield struct.pack(">BI", 2, len(told)) + told


@contextlib.contextmanager
def around(url):
    before = os.environ["HOME"]
    with tempfile.TemporaryDirectory(prefix="rollyard-home-") as home:
        os.environ["HOME"] = home
        try:
            yield
        finally:
            os.environ["HOME"] = before
