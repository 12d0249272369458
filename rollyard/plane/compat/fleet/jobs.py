"""Jobs: tasks x models x attempts, each a session with an instance of its own that is made, worked on, verified and closed.

Jobs and sessions are in the plane's storage. Every replica that has a `Runner` claims sessions that are due and holds them
while it works; what one that was stopped or killed leaves is claimed by another, or by itself when it is started again, and
begins anew in an instance of its own. A session without a score is an error and never a zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rollyard.core.ids import new_id
from rollyard.envs.fleet.verifier_code import Checked
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.instances import WorldInstance
from rollyard.plane.compat.fleet.tasks import FleetTask, TaskCatalog
from rollyard.plane.service.typed_records import WAITS, TypedRecord, TypedRecords
from rollyard.plane.storage.protocol import PlaneStore

_MOST_SESSIONS = 10_000
_JOB, _ROLLOUT = "job_", "ro_"
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
    """What a runner is given. A session's rollout has the session's id; one that is begun again has another."""

    rollout_id: str
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
    checked: Checked | None = None
    error: str | None = None


Runner = Callable[[JobAttempt], Awaitable[JobOutcome]]


class FleetSession(msgspec.Struct, frozen=True, kw_only=True):
    """`number` counts the job's. `begun` is how often a worker took it up, `lost` how often it was gone before it was done."""

    job_id: str
    owner: str
    number: int
    task_key: str
    model: str
    created_at: float
    status: Status = "pending"
    begun: int = 0
    lost: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    steps: int = 0
    checked: Checked | None = None
    error: str | None = None

    @property
    def id(self) -> str:
        return session_id(self.job_id, self.number)

    @property
    def score(self) -> float | None:
        return self.checked.score if self.checked is not None else None


def session_id(job_id: str, number: int) -> str:
    return f"{_ROLLOUT}{job_id.removeprefix(_JOB)}_{number:05}"


def job_of(session: str) -> str:
    """The id of the job that a session's id tells."""
    return _JOB + session.removeprefix(_ROLLOUT).rpartition("_")[0]


class FleetServerJob(msgspec.Struct, frozen=True, kw_only=True):
    """`tasks` are what they were when it was asked for."""

    id: str
    owner: str
    asked: JobRequest
    tasks: Mapping[str, FleetTask]
    created_at: float
    over: bool = False

    @property
    def name(self) -> str:
        return self.asked.name or self.id

    @property
    def status(self) -> Status:
        return "completed" if self.over else "running"

    @property
    def ends_at(self) -> float:
        return self.created_at + self.asked.max_duration_minutes * 60

    def pairs(self) -> list[tuple[str, str]]:
        """The task and the model of each of its sessions, by number."""
        return [(key, model) for key in self.tasks for model in self.asked.models for _ in range(self.asked.pass_k)]

    def follower(self, session: FleetSession) -> int | None:
        """The number of the session that may begin when this one is over: of one model only so many work at once."""
        numbers = [number for number, (_, model) in enumerate(self.pairs()) if model == session.model]
        place = numbers.index(session.number) + self.asked.max_concurrent_per_model
        return numbers[place] if place < len(numbers) else None


class Jobs:
    """What was asked for and what became of it. Without `runs` every job is refused."""

    def __init__(
        self, store: PlaneStore, tasks: TaskCatalog, *, runs: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self._tasks, self._runs, self.clock = tasks, runs, clock
        self.jobs = TypedRecords(store, "fleet_job", FleetServerJob, clock=clock)
        self.sessions = TypedRecords(store, "fleet_session", FleetSession, clock=clock)
        self.transcripts = TypedRecords(store, "fleet_transcript", list[Any], clock=clock)
        self.wanted = asyncio.Event()  # a client has asked for one here

    async def create(self, owner: str, wanted: JobRequest) -> FleetServerJob:
        if not self._runs:
            raise FleetRefusal(
                501, "this server runs no jobs: it has no policy for model calls (start it with --job-policy)"
            )
        tasks = {task.key: task for task in await self._choose(owner, wanted)}
        now = self.clock()
        job = FleetServerJob(id=new_id("job"), owner=owner, asked=wanted, tasks=tasks, created_at=now)
        pairs = job.pairs()
        if len(pairs) > _MOST_SESSIONS:
            raise FleetRefusal(400, f"a job has at most {_MOST_SESSIONS} sessions")
        drafts = [self.jobs.draft(owner, job.id, job)]
        before: dict[str, int] = {}
        for number, (key, model) in enumerate(pairs):
            session = FleetSession(job_id=job.id, owner=owner, number=number, task_key=key, model=model, created_at=now)
            waits = before.get(model, 0) >= wanted.max_concurrent_per_model
            due_at = WAITS if waits else now + number * 1e-6  # in their order
            drafts.append(self.sessions.draft(job.id, session.id, session, due_at=due_at))
            before[model] = before.get(model, 0) + 1
        await self.jobs.write(*drafts)
        self.wanted.set()
        return job

    async def _choose(self, owner: str, wanted: JobRequest) -> list[FleetTask]:
        for name in ("project_key", "byok_keys"):
            if getattr(wanted, name):
                raise FleetRefusal(400, f"{name} is not served here")
        if wanted.mode not in (None, "tool-use"):
            raise FleetRefusal(400, f"mode {wanted.mode} is not served here")
        if not wanted.models or wanted.pass_k < 1 or not all(all(model.partition("/")) for model in wanted.models):
            raise FleetRefusal(422, "a job has models as provider/model, and at least one pass")
        if wanted.max_concurrent_per_model < 1:
            raise FleetRefusal(422, "max_concurrent_per_model is at least 1")
        known = {task.key: task for task, _ in await self._tasks.list(owner)}
        if missing := [key for key in wanted.task_keys or () if key not in known]:
            raise FleetRefusal(404, f"Task '{missing[0]}' not found")
        keys = wanted.task_keys or [key for key, task in known.items() if task.env == wanted.env_key]
        found = [known[key] for key in keys if key not in wanted.excluded_task_keys]
        if not found:
            raise FleetRefusal(400, "a job has at least one task: name task_keys, or an env_key that has tasks")
        return found

    async def list(self, owner: str) -> list[FleetServerJob]:
        return [await self._look(kept) for kept in await self.jobs.list(owner)]

    async def find(self, owner: str, job_id: str) -> FleetServerJob:
        kept = await self.jobs.get(owner, job_id)
        if kept is None:
            raise FleetRefusal(404, f"Job '{job_id}' not found")
        return await self._look(kept)

    async def _look(self, kept: TypedRecord[FleetServerJob]) -> FleetServerJob:
        """A job is over when none of its sessions has anything left to do, which is written down by who sees it first."""
        job = kept.value
        if job.over or await self.sessions.list(job.id, unfinished=True, limit=1):
            return job
        over = replace(job, over=True)
        await self.jobs.write(self.jobs.change(kept, over))
        return over
