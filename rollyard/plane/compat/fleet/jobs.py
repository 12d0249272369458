"""Jobs: tasks x models x attempts, each a session with an instance of its own that is made, worked on, verified and closed.

Who works is a `Runner`; here is only what is to be done and what became of it. Jobs live in this process: a server that was
started again knows none of the earlier ones, while their rollouts are in the store. A session without a score is an error and
never a zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from rollyard.core.errors import Error
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.rollout import Verdict
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.instances import Make, WorldInstance, WorldInstances
from rollyard.plane.compat.fleet.tasks import FleetTask, Tasks

_log = Log("rollyard.fleet")
_KEPT = 200
_MOST_SESSIONS = 10_000
Status = Literal["pending", "running", "completed", "failed", "cancelled"]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[str, ...]
    name: str | None = None
    pass_k: int = 1
    env_key: str | None = None
    project_key: str | None = None
    task_keys: tuple[str, ...] | None = None
    excluded_task_keys: tuple[str, ...] = ()
    max_steps: int | None = None
    max_duration_minutes: int = 60
    max_concurrent_per_model: int = 30
    mode: str | None = None
    system_prompt: str | None = None
    model_prompts: Mapping[str, str] = {}
    byok_keys: Mapping[str, str] | None = None
    byok_ttl_minutes: int | None = None
    harness: str | None = None


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is given. The session's id is the rollout's."""

    session_id: str
    job_id: str
    task: FleetTask
    model: str
    place: WorldInstance
    harness: str | None
    system_prompt: str | None
    max_steps: int | None
    seconds: float


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    transcript: tuple[dict[str, Any], ...] = ()
    verdict: Verdict | None = None
    verify_s: float = 0.0
    error: str | None = None


Runner = Callable[[JobAttempt], Awaitable[JobOutcome]]


class FleetSession:
    def __init__(self, job_id: str, task: FleetTask | None, model: str) -> None:
        self.id, self.job_id, self.task, self.model = new_id("ro"), job_id, task, model
        self.status: Status = "pending"
        self.created_at = time.time()
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.outcome: JobOutcome | None = None
        self.error: str | None = None

    def end(self, status: Status, outcome: JobOutcome | None = None, error: str | None = None) -> None:
        self.status, self.outcome, self.error, self.ended_at = status, outcome, error, time.time()

    @property
    def score(self) -> float | None:
        verdict = self.outcome.verdict if self.outcome is not None else None
        return verdict.reward if verdict is not None else None


class FleetServerJob:
    def __init__(self, owner: str, asked: JobRequest, tasks: list[FleetTask]) -> None:
        self.id, self.owner, self.asked = new_id("job"), owner, asked
        self.name = asked.name or self.id
        self.created_at = time.time()
        self.status: Status = "pending"
        self.sessions = [
            FleetSession(self.id, task, model) for task in tasks for model in asked.models for _ in range(asked.pass_k)
        ]


class Jobs:
    """`parallel` is how many sessions work at once, whatever a job asks for. Without a runner every job is refused."""

    def __init__(self, places: WorldInstances, tasks: Tasks, runner: Runner | None, *, parallel: int = 4) -> None:
        self._places, self._tasks, self._runner = places, tasks, runner
        self._room = asyncio.Semaphore(parallel)
        self.jobs: dict[str, FleetServerJob] = {}
        self._running: set[asyncio.Task[None]] = set()

    def create(self, owner: str, asked: JobRequest) -> FleetServerJob:
        runner = self._runner
        if runner is None:
            raise FleetRefusal(501, "this server runs no jobs: nobody answers model calls (--job-policy)")
        job = FleetServerJob(owner, asked, self._choose(asked))
        if len(job.sessions) > _MOST_SESSIONS:
            raise FleetRefusal(400, f"a job has at most {_MOST_SESSIONS} sessions")
        for old in [name for name, one in self.jobs.items() if one.status == "completed"][: len(self.jobs) - _KEPT]:
            del self.jobs[old]
        self.jobs[job.id] = job
        work = asyncio.create_task(self._work(job, runner))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return job

    async def aclose(self) -> None:
        for work in self._running:
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)  # each has recorded how its sessions ended

    def _choose(self, asked: JobRequest) -> list[FleetTask]:
        for name in ("project_key", "byok_keys"):
            if getattr(asked, name):
                raise FleetRefusal(400, f"{name} is not served here")
        if asked.mode not in (None, "tool-use"):
            raise FleetRefusal(400, f"mode {asked.mode} is not served here")
        if not asked.models or asked.pass_k < 1 or not all(all(model.partition("/")) for model in asked.models):
            raise FleetRefusal(422, "a job has models as provider/model, and at least one pass")
        known = {task.key: task for task, _ in self._tasks.list()}
        if missing := [key for key in asked.task_keys or () if key not in known]:
            raise FleetRefusal(404, f"Task '{missing[0]}' not found")
        keys = asked.task_keys or [key for key, task in known.items() if task.env == asked.env_key]
        found = [known[key] for key in keys if key not in asked.excluded_task_keys]
        if not found:
            raise FleetRefusal(400, "a job has at least one task: name task_keys, or an env_key that has tasks")
        return found

    async def _work(self, job: FleetServerJob, runner: Runner) -> None:
        job.status = "running"
        gates = {model: asyncio.Semaphore(job.asked.max_concurrent_per_model) for model in job.asked.models}
        try:
            async with asyncio.timeout(job.asked.max_duration_minutes * 60):
                await asyncio.gather(*(self._session(job, one, runner, gates[one.model]) for one in job.sessions))
        except TimeoutError:
            _log.warning("a job ran out of its time", job=job.id)
        finally:
            for one in job.sessions:
                if one.ended_at is None:
                    one.end("cancelled", error="its job's time was over")
            job.status = "completed"

    async def _session(
        self, job: FleetServerJob, session: FleetSession, runner: Runner, gate: asyncio.Semaphore
    ) -> None:
        async with gate, self._room:
            session.status, session.started_at = "running", time.time()
            try:
                done = await self._finish(job, session, runner)
                session.end("completed" if done.error is None else "failed", done, done.error)
            except (Error, FleetRefusal, OSError, TimeoutError) as error:
                _log.warning("a session failed", job=job.id, session=session.id, cause=str(error))
                session.end("failed", error=str(error) or type(error).__name__)

    async def _finish(self, job: FleetServerJob, session: FleetSession, runner: Runner) -> JobOutcome:
        task, asked = session.task, job.asked
        assert task is not None
        seconds = job.created_at + asked.max_duration_minutes * 60 - time.time()
        make = Make(
            env_key=task.env,
            env_version=task.version,
            data_key=task.data_id,
            data_version=task.data_version,
            env_variables=task.env_variables,
            ttl_seconds=max(60, round(seconds) + 60),
            run_id=job.id,
        )
        place = await self._places.make(job.owner, make, None)
        try:
            return await runner(
                JobAttempt(
                    session_id=session.id,
                    job_id=job.id,
                    task=task,
                    model=session.model,
                    place=place,
                    harness=asked.harness,
                    system_prompt=asked.model_prompts.get(session.model, asked.system_prompt),
                    max_steps=asked.max_steps,
                    seconds=seconds,
                )
            )
        finally:
            await asyncio.shield(self._places.close(place, "its session is over"))
