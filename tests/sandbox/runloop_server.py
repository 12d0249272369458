"""Runloop's API, as far as the SDK uses it, over any backend.

Paths, methods and bodies are those of the SDK's generated client, `runloop_api_client` 3.0.0: `/v1/devboxes...` of
`resources/devboxes/devboxes.py`, with `types/devbox_view.py` and `types/devbox_async_execution_detail_view.py`;
`/v1/devboxes/disk_snapshots...` of `resources/devboxes/disk_snapshots.py`, with `types/devbox_snapshot_view.py`;
`/v1/network-policies` of `resources/network_policies.py`; `/v1/blueprints` of `resources/blueprints.py`; pages of
`pagination.py`.
"""

import asyncio
import contextlib
import hmac
import json
import math
import time
import uuid

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.errors import Error, PathError
from rollyard.core.sandbox import SandboxSpec
from tests.sandbox.running import begun

KEY = "ak_" + "c0ffee" * 8
KNOWN_IMAGES = {"python:3.12", "debian:12"}
SHOWN = 64_000  # of a program's output; what the service shows is not documented, and is bounded


def options(url, key):
    """Of a runloop backend that is to use this server."""
    return {"key": key, "url": url, "isolation": "namespace"}


class Made:
    def __init__(self, sandbox, asked):
        self.sandbox, self.asked, self.id = sandbox, asked, f"dbx_{uuid.uuid4().hex[:20]}"
        self.created, self.used, self.status = time.time(), time.monotonic(), "running"
        launch = asked.get("launch_parameters") or {}
        idle = (launch.get("lifecycle") or {}).get("after_idle")
        self.idle = idle["idle_time_seconds"] if idle else math.inf
        self.ends = math.inf if idle else time.monotonic() + launch.get("keep_alive_time_seconds", 3600)
        self.running = {}


class Server:
    def __init__(self, backend, *, key=KEY, spec=None):
        self.backend, self.key, self.spec = backend, key, spec or SandboxSpec(ttl_s=7200, lifetime="ttl")
        self.url, self.uploaded = "", 0
        self.made, self.keys, self.snapshots, self.policies, self.blueprints = {}, {}, {}, [], {}
        box = "/v1/devboxes/{id}"
        routes = [
            ("/v1/devboxes", self.create, "POST"),
            ("/v1/devboxes", self.list, "GET"),
            ("/v1/devboxes/disk_snapshots", self.list_snapshots, "GET"),
            ("/v1/devboxes/disk_snapshots/{snapshot}/delete", self.remove_snapshot, "POST"),
            (box, self.get, "GET"),
            (f"{box}/wait_for_status", self.get, "POST"),
            (f"{box}/shutdown", self.shutdown, "POST"),
            (f"{box}/keep_alive", self.keep_alive, "POST"),
            (f"{box}/execute", self.execute, "POST"),
            (f"{box}/executions/{{execution}}/wait_for_status", self.wait, "POST"),
            (f"{box}/write_file_contents", self.write, "POST"),
            (f"{box}/upload_file", self.upload, "POST"),
            (f"{box}/download_file", self.download, "POST"),
            (f"{box}/snapshot_disk", self.snapshot, "POST"),
            ("/v1/network-policies", self.list_policies, "GET"),
            ("/v1/network-policies", self.make_policy, "POST"),
            ("/v1/blueprints", self.list_blueprints, "GET"),
            ("/v1/blueprints", self.make_blueprint, "POST"),
            ("/v1/blueprints/{blueprint}", self.get_blueprint, "GET"),
            ("/v1/blueprints/{blueprint}/wait_for_status", self.get_blueprint, "POST"),
        ]
        self.app = Starlette(routes=[Route(path, self._guarded(work), methods=[how]) for path, work, how in routes])

    @property
    def options(self):
        return options(self.url, self.key)

    @property
    def live(self):
        return self.made.values()

    def _guarded(self, endpoint):
        async def answer(request):
            if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {self.key}"):
                return refused(401, "invalid API key")
            if "id" not in request.path_params:
                return await endpoint(request)
            made = self.made.get(request.path_params["id"])
            if made is None:
                return refused(404, f"devbox {request.path_params['id']} not found")
            if request.method == "POST" and made.status != "running" and not request.url.path.endswith("_status"):
                return refused(410, "the devbox is not running")
            made.used = time.monotonic()
            return await endpoint(request, made)

        return answer

    def told(self, made):
        return {
            "id": made.id, "capabilities": [], "create_time_ms": round(1000 * made.created), "status": made.status,
            "launch_parameters": made.asked.get("launch_parameters") or {}, "metadata": made.asked.get("metadata") or {},
            "state_transitions": [], "snapshot_id": made.asked.get("snapshot_id"),
        }  # fmt: skip

    async def create(self, request):
        asked, key = json.loads(await request.body()), request.headers.get("x-request-id")
        if key in self.keys:
            return JSONResponse(self.told(self.keys[key]))
        spec = msgspec.structs.replace(self.spec, env=asked.get("environment_variables") or {})
        if asked.get("snapshot_id"):
            if asked["snapshot_id"] not in self.snapshots:
                return refused(404, f"snapshot {asked['snapshot_id']} not found")
            spec = msgspec.structs.replace(spec, image=self.snapshots[asked["snapshot_id"]][1])
        elif asked.get("blueprint_name") and asked["blueprint_name"] not in self.blueprints:
            return refused(404, f"blueprint {asked['blueprint_name']} not found")
        made = Made(await self.backend.open(spec), asked)
        self.made[made.id] = made
        if key:
            self.keys[key] = made
        made.watch = asyncio.create_task(self._timers(made))
        return JSONResponse(self.told(made))

    async def _timers(self, made):
        while made.status == "running" and time.monotonic() < min(made.ends, made.used + made.idle):
            await asyncio.sleep(0.2)
        await self._end(made)

    async def _end(self, made):
        if made.status == "running":
            made.status = "shutdown"
            await made.sandbox.kill()

    async def get(self, request, made):
        return JSONResponse(self.told(made))

    async def list(self, request):
        found, after = list(self.made), request.query_params.get("starting_after")
        at = found.index(after) + 1 if after else 0
        told = [self.told(self.made[name]) for name in found[at : at + 2]]
        return JSONResponse({"devboxes": told, "has_more": at + 2 < len(found), "total_count": len(found)})

    async def shutdown(self, request, made):
        await self._end(made)
        return JSONResponse(self.told(made))

    async def keep_alive(self, request, made):
        return JSONResponse({})

    async def execute(self, request, made):
        asked = json.loads(await request.body())
        argv = ["/bin/bash", "-c", asked["command"]]
        made.running[asked["command_id"]] = begun(made.sandbox, argv, timeout=3600)
        return await self._told_execution(made, asked["command_id"], asked.get("optimistic_timeout") or 25)

    async def wait(self, request, made):
        seconds = json.loads(await request.body()).get("timeout_seconds") or 25
        return await self._told_execution(made, request.path_params["execution"], seconds)

    async def _told_execution(self, made, name, seconds):
        told = {"devbox_id": made.id, "execution_id": name, "status": "running"}
        await asyncio.wait([made.running[name]], timeout=seconds)
        if not made.running[name].done():
            return JSONResponse(told)
        try:
            done = made.running[name].result()
        except Error as error:
            return refused(410, type(error).__name__)
        texts = {"stdout": done.stdout[-SHOWN:], "stderr": done.stderr[-SHOWN:]}
        shown = {name: text.decode("utf-8", "replace") for name, text in texts.items()}
        cut = {"stdout_truncated": len(done.stdout) > SHOWN, "stderr_truncated": len(done.stderr) > SHOWN}
        return JSONResponse({**told, "status": "completed", "exit_status": done.exit_code, **shown, **cut})

    async def write(self, request, made):
        asked = json.loads(await request.body())
        await made.sandbox.write(asked["file_path"], asked["contents"])
        return JSONResponse({"devbox_id": made.id, "exit_status": 0, "stdout": "", "stderr": ""})

    async def upload(self, request, made):
        async with request.form(max_part_size=2**30) as form:
            data = await form["file"].read()
            self.uploaded += len(data)
            try:
                await made.sandbox.write(form["path"], data)
            except PathError as error:
                return refused(400, str(error))
        return JSONResponse({})

    async def download(self, request, made):
        try:
            data = await made.sandbox.read(json.loads(await request.body())["path"], max_bytes=2**30)
        except PathError as error:
            return refused(400, str(error))
        return Response(data, media_type="application/octet-stream")

    async def snapshot(self, request, made):
        asked, name = json.loads(await request.body()), f"snp_{uuid.uuid4().hex[:20]}"
        told = {"id": name, "name": asked.get("name"), "metadata": {}, "create_time_ms": round(1000 * time.time())}
        told["source_devbox_id"] = made.id
        self.snapshots[name] = (told, await made.sandbox.snapshot())
        return JSONResponse(told)

    async def list_snapshots(self, request):
        return JSONResponse({"snapshots": [told for told, _ in self.snapshots.values()], "has_more": False})

    async def remove_snapshot(self, request):
        if request.path_params["snapshot"] not in self.snapshots:
            return refused(404, "no such snapshot")
        await self.backend.images.remove(self.snapshots.pop(request.path_params["snapshot"])[1])
        return JSONResponse({})

    async def list_policies(self, request):
        return JSONResponse({"network_policies": self.policies, "has_more": False})

    async def make_policy(self, request):
        asked, now = json.loads(await request.body()), round(1000 * time.time())
        allows = (
            "allow_agent_gateway",
            "allow_all",
            "allow_devbox_to_devbox",
            "allow_mcp_gateway",
            "allow_runloop_mirrors",
        )
        egress = {**{name: bool(asked.get(name)) for name in allows}, "allowed_cidrs": [], "allowed_hostnames": []}
        times = {"create_time_ms": now, "update_time_ms": now}
        self.policies.append({"id": f"npol_{len(self.policies)}", "name": asked["name"], "egress": egress, **times})
        return JSONResponse(self.policies[-1])

    async def list_blueprints(self, request):
        wanted = request.query_params.get("name")
        found = [one for one in self.blueprints.values() if wanted in (None, one["name"])]
        return JSONResponse({"blueprints": found, "has_more": False})

    async def make_blueprint(self, request):
        asked = json.loads(await request.body())
        known = asked["dockerfile"].removeprefix("FROM ").strip() in KNOWN_IMAGES
        told = {"id": asked["name"], "name": asked["name"], "parameters": asked, "state": "created"}
        told |= {"create_time_ms": round(1000 * time.time()), "status": "build_complete" if known else "failed"}
        self.blueprints[asked["name"]] = told
        return JSONResponse(told)

    async def get_blueprint(self, request):
        return JSONResponse(self.blueprints[request.path_params["blueprint"]])


def refused(status, message):
    return JSONResponse({"message": message, "code": status}, status)


def around(url):
    return contextlib.nullcontext()
