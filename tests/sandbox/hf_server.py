"""The Jobs API and the server in a job, as far as `huggingface_hub.Sandbox` uses them, over any backend.

Written from what the SDK sends and reads. A job is a sandbox; what the real service starts in it (`sbx-server`) is played here.
An idle job ends after its idle timeout, which is what a client that is gone counts on.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import time
from datetime import UTC, datetime

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollyard.core.errors import Error, PathError, SandboxGone
from rollyard.core.sandbox import SandboxSpec
from tests.sandbox.running import begun

TOKEN = "hf_" + "c0ffee" * 6
KNOWN_IMAGES = {"python:3.12", "debian:12"}
PORT_MARK = "--49983.local"


def options(url, token):
    """Of an hf backend that is to use this server."""
    return {"token": token, "namespace": "tester", "network": "none", "isolation": "namespace"}


class Job:
    def __init__(self, sandbox, asked):
        self.sandbox, self.asked = sandbox, asked
        self.id = secrets.token_hex(12)
        self.created = datetime.now(UTC)
        self.stage = "RUNNING"
        self.used = time.monotonic()
        self.running = {}
        self.idle_s = float(asked.get("environment", {}).get("SBX_IDLE_TIMEOUT", 600))
        self.token = asked["secrets"]["SBX_TOKEN"]


class Server:
    """`url` is where it is served, put in once that is known."""

    def __init__(self, backend, *, key=TOKEN, spec=None):
        self.backend, self.token, self.spec = backend, key, spec or SandboxSpec(ttl_s=7200, lifetime="ttl")
        self.url = ""
        self.jobs = {}
        self.app = Starlette(
            routes=[
                Route("/api/whoami-v2", self.whoami),
                Route("/api/jobs/{ns}", self.create, methods=["POST"]),
                Route("/api/jobs/{ns}", self.list),
                Route("/api/jobs/{ns}/{id}", self.inspect),
                Route("/api/jobs/{ns}/{id}/cancel", self.cancel, methods=["POST"]),
                Route("/{job}/health", self.health),
                Route("/{job}/v1/exec", self.exec, methods=["POST"]),
                Route("/{job}/v1/processes", self.processes),
                Route("/{job}/v1/files/read", self.read),
                Route("/{job}/v1/files/write", self.write, methods=["PUT"]),
                Route("/{job}/v1/files/stat", self.stat),
            ]
        )

    @property
    def options(self):
        return options(self.url, self.token)

    @property
    def live(self):
        return self.jobs.values()

    def known(self, request):
        return hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {self.token}")

    async def whoami(self, request):
        if not self.known(request):
            return JSONResponse({"error": "Invalid credentials in Authorization header"}, 401)
        return JSONResponse({"name": "tester", "id": "u1", "type": "user"})

    def told(self, job):
        asked = job.asked
        moment = job.created.isoformat().replace("+00:00", "Z")
        return {
            "id": job.id,
            "createdAt": moment,
            "startedAt": moment,
            "dockerImage": asked.get("dockerImage"),
            "command": asked.get("command"),
            "arguments": asked.get("arguments") or [],
            "environment": asked.get("environment") or {},
            "secrets": {},
            "flavor": asked.get("flavor"),
            "labels": asked.get("labels") or {},
            "status": {
                "stage": job.stage,
                "message": None,
                "exposeUrls": [f"{self.url}/{job.id}{PORT_MARK}"],
            },
            "owner": {"id": "u1", "name": "tester", "type": "user"},
            "initiator": {"type": "user", "id": "u1", "name": "tester"},
        }

    async def create(self, request):
        if not self.known(request):
            return JSONResponse({"error": "Invalid credentials in Authorization header"}, 401)
        asked = json.loads(await request.body())
        if asked.get("dockerImage") not in KNOWN_IMAGES:
            return JSONResponse({"error": f"image {asked.get('dockerImage')} is not known"}, 400)
        env = {name: value for name, value in asked.get("environment", {}).items() if not name.startswith("SBX_")}
        sandbox = await self.backend.open(msgspec.structs.replace(self.spec, env=env))
        job = Job(sandbox, asked)
        self.jobs[job.id] = job
        job.watch = asyncio.create_task(self._idle(job))
        return JSONResponse(self.told(job))

    async def _idle(self, job):
        while job.stage == "RUNNING" and time.monotonic() - job.used < job.idle_s:
            await asyncio.sleep(0.2)
        await self._end(job, "COMPLETED")

    async def _end(self, job, stage):
        if job.stage == "RUNNING":
            job.stage = stage
            await job.sandbox.kill()

    def _job(self, request):
        return self.jobs.get(request.path_params["id"])

    async def inspect(self, request):
        if not self.known(request):
            return JSONResponse({"error": "Invalid credentials"}, 401)
        job = self._job(request)
        return JSONResponse(self.told(job)) if job else JSONResponse({"error": "Job not found"}, 404)

    async def list(self, request):
        if not self.known(request):
            return JSONResponse({"error": "Invalid credentials"}, 401)
        wanted = dict(text.split("=", 1) for text in request.query_params.getlist("label"))
        found = [job for job in self.jobs.values() if wanted.items() <= job.asked.get("labels", {}).items()]
        return JSONResponse([self.told(job) for job in found])

    async def cancel(self, request):
        job = self._job(request)
        if job is None or not self.known(request):
            return JSONResponse({"error": "Job not found"}, 404)
        await self._end(job, "CANCELED")
        return JSONResponse({})

    # the server in the job

    def _served(self, request):
        job = self.jobs.get(request.path_params["job"].removesuffix(PORT_MARK))
        if job is None or job.stage != "RUNNING":
            return None, JSONResponse({"error": "no such job"}, 404)
        if not self.known(request) or not hmac.compare_digest(request.headers.get("x-sandbox-token", ""), job.token):
            return None, JSONResponse({"error": "unauthorized"}, 401)
        job.used = time.monotonic()
        return job, None

    async def health(self, request):
        _, refused = self._served(request)
        return refused or JSONResponse({"protocol": 3, "version": "0.7.0"})

    async def exec(self, request):
        job, refused = self._served(request)
        if refused:
            return refused
        asked = json.loads(await request.body())
        return StreamingResponse(self._events(job, asked), media_type="application/x-ndjson")

    async def _events(self, job, asked):
        began = time.monotonic()
        running = begun(
            job.sandbox,
            asked["cmd"],
            env=asked.get("env") or {},
            cwd=asked.get("cwd"),
            stdin=asked["stdin"].encode() if asked.get("stdin") is not None else None,
            timeout=asked.get("timeout") or 3600,
        )
        try:
            while not (await asyncio.wait([running], timeout=5))[0]:
                yield b'{"event": "ping"}\n'
            done = running.result()
        except Error as error:
            end = {"event": "exit", "exit_code": None, "signal": 9, "error": type(error).__name__}
            yield json.dumps(end).encode() + b"\n"
            return
        finally:
            running.cancel()
        for name, data in (("stdout", done.stdout), ("stderr", done.stderr)):
            text = data.decode("utf-8", "replace")
            for at in range(0, len(text), 2**16):
                yield json.dumps({"event": name, "data": text[at : at + 2**16]}).encode() + b"\n"
        took = int((time.monotonic() - began) * 1000)
        end = {"exit_code": done.exit_code, "signal": done.signal, "timed_out": done.timed_out, "duration_ms": took}
        yield json.dumps({"event": "exit", **end}).encode() + b"\n"

    async def processes(self, request):
        _, refused = self._served(request)
        return refused or JSONResponse([])

    async def _file(self, request, work):
        job, refused = self._served(request)
        if refused:
            return refused
        try:
            return await work(job, request.query_params["path"])
        except PathError as error:
            return JSONResponse({"error": str(error)}, 404 if error.errno_name == "ENOENT" else 400)
        except SandboxGone:
            return JSONResponse({"error": "no such job"}, 404)

    async def read(self, request):
        async def work(job, path):
            data = await job.sandbox.read(path, max_bytes=2**30)
            at = int(request.query_params.get("offset", 0))
            return Response(data[at : at + int(request.query_params.get("length", len(data)))])

        return await self._file(request, work)

    async def write(self, request):
        body = await request.body()

        async def work(job, path):
            query = request.query_params
            if "offset" in query:
                await self._range(job, path, int(query["offset"]), body, query.get("truncate_to"))
            else:
                await job.sandbox.write(path, body)
            return JSONResponse({})

        return await self._file(request, work)

    async def _range(self, job, path, offset, body, total):
        """Ranges come in any order; the file is written when the last one is here."""
        parts = job.running.setdefault(path, {})
        parts[offset] = body
        parts["total"] = int(total) if total is not None else parts.get("total")
        if parts["total"] == sum(len(part) for at, part in parts.items() if at != "total"):
            del parts["total"], job.running[path]
            await job.sandbox.write(path, b"".join(parts[at] for at in sorted(parts)))

    async def stat(self, request):
        async def work(job, path):
            found = await job.sandbox.stat(path)
            named = {"name": os.path.basename(path), "path": path, "type": found.kind, "size": found.size}
            return JSONResponse({**named, "mtime_ms": int(found.mtime * 1000), "mode": f"{found.mode:o}"})

        return await self._file(request, work)


@contextlib.contextmanager
def around(url):
    """The SDK has one endpoint for a process, which it reads when it is imported."""
    from huggingface_hub import constants

    before, variable = constants.ENDPOINT, os.environ.get("HF_ENDPOINT")
    constants.ENDPOINT = os.environ["HF_ENDPOINT"] = url
    try:
        yield
    finally:
        constants.ENDPOINT = before
        del os.environ["HF_ENDPOINT"]
        if variable is not None:
            os.environ["HF_ENDPOINT"] = variable
