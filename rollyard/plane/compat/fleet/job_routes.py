"""`/v1/jobs`, `/v1/sessions` and `/v1/traces`: jobs asked for and looked at, and sessions that clients write themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollyard.core.ids import new_id
from rollyard.plane.compat.fleet.control import Endpoint, body, for_owner
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.guard import Guard
from rollyard.plane.compat.fleet.jobs import FleetServerJob, FleetSession, JobRequest, Jobs, job_of
from rollyard.plane.compat.fleet.tasks import FleetTask
from rollyard.plane.service.shapes import rfc3339

_PASSED = 1.0


class Ingest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client logs: `messages`, or the `history` and `response` of its own model client."""

    session_id: str | None = None
    messages: list[Any] = []
    history: Any = None
    response: Any = None
    status: str | None = None
    model: str | None = None
    task_key: str | None = None
    job_id: str | None = None
    instance_id: str | None = None


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None


class JobRoutes:
    def __init__(self, jobs: Jobs, guard: Guard) -> None:
        self._jobs, self._guard = jobs, guard

    def routes(self) -> list[Route]:
        def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
            return Route(path, for_owner(self._guard, endpoint), methods=[method])

        return [
            route("/v1/jobs", self.create, "POST"),
            route("/v1/jobs", self.list),
            route("/v1/jobs/{id}", self.get),
            route("/v1/sessions/job/{id}", self.sessions),
            route("/v1/sessions/ingest", self.ingest, "POST"),
            route("/v1/sessions/{id}/transcript", self.transcript),
            route("/v1/traces/jobs", self.trace_job, "POST"),
            route("/v1/traces/logs", self.ingest, "POST"),
        ]

    async def create(self, request: Request, owner: str) -> Response:
        job = await self._jobs.create(owner, await body(request, JobRequest))
        return JSONResponse({"job_id": job.id, "workflow_job_id": job.id, "status": "pending", "name": job.name})

    async def list(self, request: Request, owner: str) -> Response:
        found = [_job(job) for job in await self._jobs.list(owner)]
        return JSONResponse({"jobs": found, "total": len(found)})

    async def get(self, request: Request, owner: str) -> Response:
        return JSONResponse(_job(await self._jobs.find(owner, request.path_params["id"])))

    async def sessions(self, request: Request, owner: str) -> Response:
        job = await self._jobs.find(owner, request.path_params["id"])
        groups: dict[str, list[FleetSession]] = {}
        kept = await self._jobs.sessions.list(job.id)
        for one in kept:
            groups.setdefault(one.value.task_key, []).append(one.value)
        answer = [_group(job.tasks[key], sessions) for key, sessions in groups.items()]
        return JSONResponse({"job_id": job.id, "total_sessions": len(kept), "tasks": answer})

    async def transcript(self, request: Request, owner: str) -> Response:
        session_id = request.path_params["id"]
        said = await self._jobs.transcripts.get(owner, session_id)
        lines = said.value if said is not None else []
        job = await self._jobs.jobs.get(owner, job_of(session_id))
        session = await self._jobs.sessions.get(job.value.id, session_id) if job is not None else None
        if job is not None and session is not None:
            task = _task(job.value.tasks[session.value.task_key])
            about = {"task": task, "verifier_execution": _describe_verdict(session.value)}
            return JSONResponse({**about, "transcript": lines})
        if said is None:
            raise FleetRefusal(404, f"Session '{session_id}' not found")
        return JSONResponse({"task": None, "transcript": lines})

    async def trace_job(self, request: Request, owner: str) -> Response:
        wanted = await body(request, TraceJob)
        job_id = new_id("job")
        return JSONResponse({"job_id": job_id, "name": wanted.name or job_id, "status": "running"})

    async def ingest(self, request: Request, owner: str) -> Response:
        wanted = await body(request, Ingest)
        session_id = wanted.session_id or new_id("ses")
        new = [*_messages(wanted.history), *wanted.messages, *_messages(wanted.response)]  # each says what is new
        kept = await self._jobs.transcripts.update(owner, session_id, lambda there: [*(there or ()), *new])
        answer = {"success": True, "session_id": session_id, "message_count": len(kept)}
        return JSONResponse({**answer, "created_new_session": len(kept) == len(new)})


def _messages(given: Any) -> list[Any]:
    """Kept as they came; what is no message by itself becomes one."""
    found = given if isinstance(given, list) else [] if given is None else [given]
    return [one if isinstance(one, dict) and "role" in one else {"role": "assistant", "content": one} for one in found]


def _job(job: FleetServerJob) -> dict[str, Any]:
    return {"id": job.id, "name": job.name, "created_at": rfc3339(job.created_at), "status": job.status}


def _task(task: FleetTask) -> dict[str, Any]:
    answer = {"key": task.key, "prompt": task.prompt, "env_id": task.env, "env_variables": task.env_variables}
    return {**answer, "version": task.version, "verifier_func": task.verifier_func, "metadata": task.metadata}


def _group(task: FleetTask, sessions: list[FleetSession]) -> dict[str, Any]:
    scores = [session.score for session in sessions if session.score is not None]
    passed = sum(score >= _PASSED for score in scores)
    return {
        "task_id": task.key,
        "task": _task(task),
        "total_sessions": len(sessions),
        "passed_sessions": passed,
        "pass_rate": passed / len(sessions),
        "average_score": sum(scores) / len(scores) if scores else None,
        "sessions": [_session(session) for session in sessions],
    }


def _session(session: FleetSession) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "model": session.model,
        "status": session.status,
        "created_at": rfc3339(session.created_at),
        "started_at": rfc3339(session.started_at),
        "ended_at": rfc3339(session.ended_at),
        "step_count": session.steps,
        "error": session.error,
        "verifier_execution": _describe_verdict(session),
    }


def _describe_verdict(session: FleetSession) -> dict[str, Any] | None:
    checked = session.checked
    if checked is None:
        return None
    return {
        "success": checked.score is not None,
        "score": checked.score,
        "stdout": checked.stdout,
        "execution_time_ms": round(checked.seconds * 1000),
        "result": checked.result,
    }
