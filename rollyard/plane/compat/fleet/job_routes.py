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
from rollyard.plane.compat.fleet.jobs import FleetServerJob, FleetSession, JobRequest, Jobs
from rollyard.plane.compat.fleet.tasks import FleetTask
from rollyard.plane.service.shapes import rfc3339

_KEPT = 2000
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


class Written(msgspec.Struct):
    """A session that its client writes."""

    id: str
    owner: str
    messages: list[Any] = []


class JobRoutes:
    def __init__(self, jobs: Jobs, guard: Guard) -> None:
        self._jobs, self._guard = jobs, guard
        self._written: dict[str, Written] = {}

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
        job = self._jobs.create(owner, await body(request, JobRequest))
        return JSONResponse({"job_id": job.id, "workflow_job_id": job.id, "status": job.status, "name": job.name})

    async def list(self, request: Request, owner: str) -> Response:
        found = [_job(job) for job in self._jobs.jobs.values() if job.owner == owner]
        return JSONResponse({"jobs": found, "total": len(found)})

    async def get(self, request: Request, owner: str) -> Response:
        return JSONResponse(_job(self._find(request, owner)))

    async def sessions(self, request: Request, owner: str) -> Response:
        job = self._find(request, owner)
        groups: dict[str, list[FleetSession]] = {}
        for session in job.sessions:
            groups.setdefault(session.task.key if session.task else "", []).append(session)
        told = [_group(sessions) for sessions in groups.values()]
        return JSONResponse({"job_id": job.id, "total_sessions": len(job.sessions), "tasks": told})

    async def transcript(self, request: Request, owner: str) -> Response:
        session_id = request.path_params["id"]
        written = self._written.get(session_id)
        if written is not None and written.owner == owner:
            return JSONResponse({"task": None, "transcript": written.messages})
        for job in self._jobs.jobs.values():
            for session in job.sessions:
                if session.id == session_id and job.owner == owner:
                    lines = session.outcome.transcript if session.outcome is not None else ()
                    about = {"task": _task(session.task), "verifier_execution": _describe_verdict(session)}
                    return JSONResponse({**about, "transcript": list(lines)})
        raise FleetRefusal(404, f"Session '{session_id}' not found")

    async def trace_job(self, request: Request, owner: str) -> Response:
        asked = await body(request, TraceJob)
        job_id = new_id("job")
        return JSONResponse({"job_id": job_id, "name": asked.name or job_id, "status": "running"})

    async def ingest(self, request: Request, owner: str) -> Response:
        asked = await body(request, Ingest)
        known = self._written.get(asked.session_id or "")
        if known is not None and known.owner != owner:
            raise FleetRefusal(404, f"Session '{asked.session_id}' not found")
        session = known or Written(id=asked.session_id or new_id("ses"), owner=owner, messages=[])
        while len(self._written) >= _KEPT:
            del self._written[next(iter(self._written))]
        self._written[session.id] = session
        session.messages += [
            *_messages(asked.history),
            *asked.messages,
            *_messages(asked.response),
        ]  # each says what is new
        told = {"success": True, "session_id": session.id, "message_count": len(session.messages)}
        return JSONResponse({**told, "created_new_session": known is None})

    def _find(self, request: Request, owner: str) -> FleetServerJob:
        job = self._jobs.jobs.get(request.path_params["id"])
        if job is None or job.owner != owner:
            raise FleetRefusal(404, f"Job '{request.path_params['id']}' not found")
        return job


def _messages(given: Any) -> list[Any]:
    """Kept as they came; what is no message by itself becomes one."""
    found = given if isinstance(given, list) else [] if given is None else [given]
    return [one if isinstance(one, dict) and "role" in one else {"role": "assistant", "content": one} for one in found]


def _job(job: FleetServerJob) -> dict[str, Any]:
    return {"id": job.id, "name": job.name, "created_at": rfc3339(job.created_at), "status": job.status}


def _task(task: FleetTask | None) -> dict[str, Any] | None:
    if task is None:
        return None
    told = {"key": task.key, "prompt": task.prompt, "env_id": task.env, "env_variables": task.env_variables}
    return {**told, "version": task.version, "verifier_func": task.verifier_func, "metadata": task.metadata}


def _group(sessions: list[FleetSession]) -> dict[str, Any]:
    scores = [session.score for session in sessions if session.score is not None]
    passed = sum(score >= _PASSED for score in scores)
    return {
        "task_id": sessions[0].task.key if sessions[0].task else None,
        "task": _task(sessions[0].task),
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
        "step_count": session.outcome.steps if session.outcome is not None else 0,
        "error": session.error,
        "verifier_execution": _describe_verdict(session),
    }


def _describe_verdict(session: FleetSession) -> dict[str, Any] | None:
    outcome = session.outcome
    if outcome is None or outcome.verdict is None:
        return None
    return {
        "success": outcome.verdict.reward is not None,
        "score": outcome.verdict.reward,
        "stdout": outcome.verdict.log,
        "execution_time_ms": round(outcome.verify_s * 1000),
        "result": outcome.verdict.reward,
    }
