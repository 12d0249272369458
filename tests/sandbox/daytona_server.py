"""Daytona's API and the toolbox in a sandbox, as far as the SDK uses them, over any backend.

Paths, methods and bodies are those of the SDK's generated clients, 0.226.1: `/sandbox...` of `api/sandbox_api.py`, with
`models/sandbox.py` and `models/create_sandbox.py`; `/snapshots...` of `api/snapshots_api.py`, with `models/snapshot_dto.py` and
`models/paginated_snapshots.py`; `/toolbox...` of `daytona_toolbox_api_client` (`process_api.py`, `file_system_api.py`).
"""

import asyncio
import contextlib
import hmac
import json
import math
import time
import uuid
from datetime import UTC, datetime, timedelta

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import Error, PathError
from rollyard.core.sandbox import SandboxSpec
from tests.sandbox.running import ran

KEY = "dtn_" + "c0ffee" * 8
KNOWN_IMAGES = {"python:3.12", "debian:12"}


def options(url, key):
    """Of a daytona backend that is to use this server."""
    return {"key": key, "url": f"{url}/api", "isolation": "namespace"}


class Made:
    def __init__(self, sandbox, asked):
        self.sandbox, self.asked = sandbox, asked
        self.id = str(uuid.uuid4())
        self.created = datetime.now(UTC)
        self.state = "started"
        self.labels = asked.get("labels") or {}
        self.used = time.monotonic()
        self.ttl = asked.get("ttlMinutes") or 0
        self.ends = time.monotonic() + 60 * self.ttl if self.ttl else math.inf


class Server:
    def __init__(self, backend, *, key=KEY, spec=None):
        self.backend, self.key, self.spec = backend, key, spec or SandboxSpec(ttl_s=7200, lifetime="ttl")
        self.url = ""
        self.made, self.snapshots, self.uploaded = {}, {}, 0
        box, tool = "/api/sandbox/{id}", "/toolbox/{id}"
        self.app = Starlette(
            routes=[
                Route("/api/sandbox", self._guarded(self.create), methods=["POST"]),
                Route("/api/sandbox", self._guarded(self.list)),
                Route(box, self._guarded(self.get)),
                Route(box, self._guarded(self.delete), methods=["DELETE"]),
                Route(f"{box}/labels", self._guarded(self.set_labels), methods=["PUT"]),
                Route(f"{box}/ttl/{{minutes}}", self._guarded(self.set_ttl), methods=["POST"]),
                Route(f"{box}/last-activity", self._guarded(self.activity), methods=["POST"]),
                Route(f"{box}/snapshot", self._guarded(self.snapshot), methods=["POST"]),
                Route(f"{box}/pause", self._guarded(self.pause), methods=["POST"]),
                Route(f"{box}/start", self._guarded(self.start), methods=["POST"]),
                Route("/api/snapshots", self._guarded(self.snapshots_page)),
                Route("/api/snapshots/{name}", self._guarded(self.get_snapshot)),
                Route("/api/snapshots/{name}", self._guarded(self.remove_snapshot), methods=["DELETE"]),
                Route(f"{tool}/process/execute", self._guarded(self.execute), methods=["POST"]),
                Route(f"{tool}/files/bulk-upload", self._guarded(self.upload), methods=["POST"]),
                Route(f"{tool}/files/bulk-download", self._guarded(self.download), methods=["POST"]),
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
                return refused(401, "Invalid credentials", "UNAUTHORIZED")
            if "id" not in request.path_params:
                return await endpoint(request)
            made = self.made.get(request.path_params["id"])
            if made is None:
                return refused(404, f"Sandbox {request.path_params['id']} not found", "NOT_FOUND")
            if request.url.path.startswith("/toolbox") and made.state != "started":
                return refused(404, "sandbox is not running", "NOT_FOUND")
            made.used = time.monotonic()
            return await endpoint(request, made)

        return answer

    def told(self, made):
        asked = made.asked
        moment = made.created.isoformat()
        return {
            "id": made.id,
            "organizationId": "org1",
            "name": asked.get("name") or made.id,
            "snapshot": asked.get("snapshot") or "daytona-default",
            "user": "daytona",
            "env": asked.get("env") or {},
            "labels": made.labels,
            "public": False,
            "networkBlockAll": bool(asked.get("networkBlockAll")),
            "kvm": False,
            "target": asked.get("target") or "us",
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
            "state": made.state,
            "desiredState": "started" if made.state == "started" else "destroyed",
            "autoStopInterval": asked.get("autoStopInterval"),
            "autoDeleteInterval": asked.get("autoDeleteInterval"),
            "autoDestroyAt": (made.created + timedelta(minutes=made.ttl)).isoformat() if made.ttl else None,
            "createdAt": moment,
            "updatedAt": moment,
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }

    async def create(self, request):
        asked = json.loads(await request.body())
        dockerfile = (asked.get("buildInfo") or {}).get("dockerfileContent", "")
        image = dockerfile.split("\n")[0].removeprefix("FROM ").strip()
        if image and image not in KNOWN_IMAGES:
            return refused(400, f"image {image} could not be pulled", "BAD_REQUEST")
        spec = msgspec.structs.replace(self.spec, env=asked.get("env") or {})
        if asked.get("snapshot"):
            if asked["snapshot"] not in self.snapshots:
                return refused(404, f"Snapshot {asked['snapshot']} not found", "NOT_FOUND")
            spec = msgspec.structs.replace(spec, image=self.snapshots[asked["snapshot"]])
        sandbox = await self.backend.open(spec)
        made = Made(sandbox, asked)
        self.made[made.id] = made
        made.watch = asyncio.create_task(self._timers(made))
        return JSONResponse(self.told(made))

    async def _timers(self, made):
        stop = 60 * (made.asked.get("autoStopInterval") or 1e6)
        while made.state == "paused" or (
            made.state == "started" and time.monotonic() < min(made.ends, made.used + stop)
        ):
            await asyncio.sleep(0.2)
        await self._end(made)

    async def _end(self, made):
        if made.state in ("started", "paused"):
            made.state = "destroyed"
            await made.sandbox.kill()

    async def pause(self, request, made):
        await made.sandbox.pause()
        made.state = "paused"
        return JSONResponse(self.told(made))

    async def start(self, request, made):
        await made.sandbox.resume()
        made.state, made.used = "started", time.monotonic()
        return JSONResponse(self.told(made))

    async def snapshot(self, request, made):
        self.snapshots[json.loads(await request.body())["name"]] = await made.sandbox.snapshot()
        return JSONResponse(self.told(made))

    def told_snapshot(self, name):
        moment = datetime.now(UTC).isoformat()
        size = {"size": 1, "cpu": 1, "gpu": 0, "mem": 1, "disk": 3}
        when = {"createdAt": moment, "updatedAt": moment, "lastUsedAt": None}
        unknown = {"entrypoint": None, "errorReason": None, "sourceSandboxId": None}
        return {"id": name, "general": False, "name": name, "state": "active", **size, **when, **unknown}

    async def snapshots_page(self, request):
        found = [self.told_snapshot(name) for name in self.snapshots]
        return JSONResponse({"items": found, "total": len(found), "page": 1, "totalPages": 1})

    async def get_snapshot(self, request):
        name = request.path_params["name"]
        if name not in self.snapshots:
            return refused(404, f"Snapshot {name} not found", "NOT_FOUND")
        return JSONResponse(self.told_snapshot(name))

    async def remove_snapshot(self, request):
        await self.backend.images.remove(self.snapshots.pop(request.path_params["name"]))
        return Response(status_code=200)

    async def get(self, request, made):
        return JSONResponse(self.told(made))

    async def list(self, request):
        wanted = json.loads(request.query_params.get("labels") or "{}")
        found = [
            self.told(made)
            for made in self.made.values()
            if wanted.items() <= made.labels.items() and made.state != "destroyed"
        ]
        at = int(request.query_params.get("cursor") or 0)
        more = str(at + 2) if at + 2 < len(found) else None
        return JSONResponse({"items": found[at : at + 2], "nextCursor": more})

    async def delete(self, request, made):
        if made.state not in ("started", "paused"):
            return refused(404, "Sandbox not found", "NOT_FOUND")
        await self._end(made)
        return JSONResponse(self.told(made))

    async def set_labels(self, request, made):
        made.labels = json.loads(await request.body())["labels"]
        return JSONResponse({"labels": made.labels})

    async def set_ttl(self, request, made):
        made.ttl = int(request.path_params["minutes"])
        made.ends = time.monotonic() + 60 * made.ttl if made.ttl else math.inf
        return JSONResponse(self.told(made))

    async def activity(self, request, made):
        return Response(status_code=201)

    async def execute(self, request, made):
        asked = json.loads(await request.body())
        limit = asked.get("timeout") or 10
        try:
            argv, env = ["/bin/bash", "-c", asked["command"]], asked.get("envs") or {}
            done = await ran(made.sandbox, argv, env=env, cwd=asked.get("cwd"), timeout=limit)
        except Error as error:
            return refused(400, type(error).__name__, "BAD_REQUEST")
        if done.timed_out:
            return refused(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT")
        code = done.exit_code if done.exit_code is not None else -1
        return JSONResponse({"exitCode": code, "result": (done.stdout + done.stderr).decode("utf-8", "replace")})

    async def upload(self, request, made):
        async with request.form(max_part_size=2**30) as form:
            try:
                for field, value in form.items():
                    if field.endswith(".file"):
                        data = await value.read()
                        self.uploaded += len(data)
                        await made.sandbox.write(form[field.removesuffix(".file") + ".path"], data)
            except PathError as error:
                return JSONResponse({"errors": [str(error)]}, 400)
        return JSONResponse({})

    async def download(self, request, made):
        asked = json.loads(await request.body())
        boundary, parts = uuid.uuid4().hex, b""
        for path in asked["paths"]:
            try:
                data, name, kind = await made.sandbox.read(path, max_bytes=2**30), "file", "application/octet-stream"
            except PathError as error:
                data, name, kind = json.dumps({"message": str(error)}).encode(), "error", "application/json"
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\n'
            parts += head.encode() + f"Content-Type: {kind}\r\n\r\n".encode() + data + b"\r\n"
        body = parts + f"--{boundary}--\r\n".encode()
        return Response(body, media_type=f"multipart/form-data; boundary={boundary}")


def refused(status, message, code):
    told = {"statusCode": status, "message": message, "code": code, "source": "DAYTONA_API"}
    return JSONResponse(told, status)


def around(url):
    return contextlib.nullcontext()
