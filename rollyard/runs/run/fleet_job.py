"""A task evaluated as a job on a Fleet server, through Fleet's own SDK: import the task, create the job, ask for its sessions
until all have ended.

The SDK only blocks, so each request runs on a thread; a cancelled evaluation leaves at once and lets the request end by itself.
Fleet has no way to cancel a job: one that was abandoned runs out on the server, by its own time limit. A session without a score
is an error and never a zero.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from anyio import to_thread

from rollyard.core.errors import ConfigError, EnvUnavailable, MissingExtra
from rollyard.core.task import Task
from rollyard.runs.report.quality import ModelScores, TaskQuality, judge_task, same_model

T = TypeVar("T")

_OVER = frozenset({"completed", "failed", "cancelled", "canceled", "error", "errored", "timeout", "timed_out"})
_REQUEST_S = 120.0
_MAX_FAILED_POLLS = 5  # polls in a row that may fail before the job is given up


class FleetJob(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is evaluated, and in which environment. The key is read from the variable that `key_env` names."""

    env: str
    verifier_code: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    env_variables: Mapping[str, Any] = {}
    project: str | None = None
    base_url: str | None = None
    key_env: str = "FLEET_API_KEY"
    max_steps: int = 30
    mode: str | None = None
    harness: str | None = None
    poll_s: float = 10.0
    limit_s: float = 1800.0


async def evaluate_remotely(task: Task, models: Sequence[str], attempts: int, job: FleetJob) -> TaskQuality:
    """Scores per model from `attempts` sessions each. After `limit_s`, sessions that have not ended are errors."""
    for model in models:
        if not all(model.partition("/")):
            raise ConfigError(f"{model!r} is not provider/model", hint="a Fleet job asks for models as provider/model")
    client = _client(job)
    key = task_key(task, job)
    if await _call(client.import_single_task, _fleet_task(task, key, job), project_key=job.project) is None:
        raise EnvUnavailable(f"Fleet did not take the task {key}; its SDK does not say why")
    created = await _call(
        client.create_job,
        models=list(models),
        pass_k=attempts,
        task_keys=[key],
        max_steps=job.max_steps,
        max_duration_minutes=max(1, -(-int(job.limit_s) // 60)),
        mode=job.mode,
        harness=job.harness,
    )
    sessions = await _await_end(client, created.job_id, job, expected=attempts * len(models))
    scores, broken = _scores(sessions, models, attempts)
    found = judge_task(task.id, scores, verifier_errors=broken)
    return msgspec.structs.replace(found, job_id=created.job_id)


async def _await_end(client: Any, job_id: str, job: FleetJob, *, expected: int) -> list[Any]:
    """The job's sessions, once all have ended or the time is up."""
    deadline = time.monotonic() + job.limit_s
    sessions: list[Any] = []
    failed = 0
    while True:
        try:
            status = (
                await _call(client.get_job, job_id)
            ).status  # before its sessions: then a job that is over has them all
            listed = await _call(client.list_job_sessions, job_id)
            sessions = [session for group in listed.tasks for session in group.sessions]
            failed = 0
        except EnvUnavailable:
            failed += 1
            if failed >= _MAX_FAILED_POLLS:
                raise
        else:
            if len(sessions) >= expected and all(_over(session.status) for session in sessions):
                return sessions
            if _over(status):
                return sessions
        if time.monotonic() + job.poll_s > deadline:
            return sessions
        await anyio.sleep(job.poll_s)


def _scores(sessions: Sequence[Any], models: Sequence[str], attempts: int) -> tuple[list[ModelScores], int]:
    """By model as it was asked for, whatever the server calls it; and how many sessions the verifier failed to score."""
    scores: list[ModelScores] = []
    broken = 0
    for model in models:
        rewards: list[float] = []
        errors: list[str] = []
        for session in (one for one in sessions if same_model(one.model, model)):
            verdict = session.verifier_execution
            if verdict is not None and verdict.success and verdict.score is not None:
                rewards.append(float(verdict.score))
                continue
            broken += verdict is not None
            errors.append(_why(session))
        errors += ["no session of it was seen"] * (attempts - len(rewards) - len(errors))
        scores.append(ModelScores(model=model, rewards=tuple(rewards), errors=tuple(errors)))
    return scores, broken


def _why(session: Any) -> str:
    verdict = session.verifier_execution
    if verdict is not None:
        said = (verdict.stdout or "").strip()[-300:]
        return f"the verifier gave no score{': ' + said if said else ''}"
    return "it was not verified" if session.status == "completed" else f"the session is {session.status}"


def _over(status: str | None) -> bool:
    return (status or "").lower() in _OVER


def task_key(task: Task, job: FleetJob) -> str:
    """A name the server takes, the same again for the same task, verifier and environment."""
    words = re.sub(r"[^a-z0-9]+", "-", task.id.lower()).strip("-")[:40].strip("-")
    parts = (task.digest, job.verifier_code, job.env, job.env_version, job.data_key, job.data_version)
    digest = hashlib.sha256("\0".join(part or "" for part in parts).encode()).hexdigest()[:12]
    return f"{words or 'task'}-{digest}"


def _client(job: FleetJob) -> Any:
    key = os.environ.get(job.key_env)
    if not key:
        raise ConfigError(f"the variable {job.key_env!r}, which holds the key of the Fleet server, is not set")
    try:
        from fleet import Fleet
    except ImportError as error:
        raise MissingExtra("fleet", "fleet", why="evaluating on a Fleet server") from error
    return Fleet(api_key=key, base_url=job.base_url, timeout=_REQUEST_S)


def _fleet_task(task: Task, key: str, job: FleetJob) -> Any:
    from fleet import tasks

    make: Any = tasks.Task  # its optional fields have no defaults that a type checker sees
    return make(
        key=key,
        prompt=task.instruction,
        env_id=job.env,
        version=job.env_version,
        data_id=job.data_key,
        data_version=job.data_version,
        env_variables=dict(job.env_variables),
        verifier_func=job.verifier_code,
        metadata={"source": "rollyard"},
    )


async def _call(request: Callable[..., T], *args: Any, **fields: Any) -> T:
    """One request on a thread, which a cancellation leaves behind."""
    from fleet import exceptions

    work = partial(request, *args, **fields)
    try:
        with anyio.fail_after(4 * _REQUEST_S):
            return await to_thread.run_sync(work, abandon_on_cancel=True)
    except exceptions.FleetAuthenticationError as error:
        raise ConfigError(f"the Fleet server refused the key: {error}") from error
    except (exceptions.FleetError, TimeoutError, OSError) as error:
        raise EnvUnavailable(f"the Fleet server did not answer: {error}") from error
    except Exception as error:  # httpx has a tree of its own, which is not ours to import
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore"):
            raise
        raise EnvUnavailable(f"the Fleet server could not be reached: {error}") from error
