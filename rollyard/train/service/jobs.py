"""The jobs of a server: taken, run, cancelled, and gone on with after a restart.

A job is a row in the store and a `Run` under an id that the row has from the beginning, so a server that died goes on with what
is owed. Several servers may share one store: attempts are claimed under leases, so any server may run the job.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup

from rollyard.core.errors import ConfigError, Error
from rollyard.core.ids import new_id
from rollyard.core.log import Log
from rollyard.core.protocols import Backend
from rollyard.core.rollout import Rollout
from rollyard.core.rollout_job import OPEN_JOBS, RolloutJob
from rollyard.gate import Gate
from rollyard.net.http_client import BadAnswer, HttpPool
from rollyard.runs.run.run import Run
from rollyard.store import Store
from rollyard.train.service.request import RolloutJobRequest, ServiceDefaults, config_of, read_request, tasks_of

_CALLBACK_S = (0.0, 1.0, 4.0, 16.0, 64.0)  # before each try to tell the caller
_TELL_S = 10.0  # for one try
_MAX_ANSWER = 64 * 1024


class JobConflict(Error):
    """The same key for another request."""


class TooManyJobs(Error):
    """An owner has as many jobs under way as the server gives."""


class RolloutJobs:
    """`running` bounds the jobs under way at a time; the others wait in the order they came."""

    def __init__(
        self, store: Store, gate: Gate, backend: Backend, server: ServiceDefaults, *, running: int = 4, quota: int = 100
    ) -> None:
        self._store, self._gate, self._backend, self._server = store, gate, backend, server
        self._places = anyio.CapacityLimiter(running)
        self._quota = quota
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._group: TaskGroup | None = None
        self._log = Log("rollyard.train.jobs")

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """While it is open, jobs run: first those that an earlier server left."""
        async with anyio.create_task_group() as group:
            self._group = group
            after = ""
            while left := await self._store.jobs(states=OPEN_JOBS, after=after):
                for job in left:
                    group.start_soon(self._work, job)
                after = left[-1].id
            try:
                yield
            finally:
                group.cancel_scope.cancel()

    async def submit(self, owner: str, key: str | None, body: bytes, sign: str) -> tuple[RolloutJob, bool]:
        """The job, and whether it is new. All that can be refused is, before anything is kept."""
        request = read_request(body)
        config = config_of(request, self._server)
        tasks = await anyio.to_thread.run_sync(tasks_of, request, self._server)
        if request.callback is not None:
            self._check_callback(request.callback)
        # What it refuses is reported now
        Run(tasks, gate=self._gate, store=self._store, config=config, sandbox=self._backend)
        now, job_id = time.time(), new_id("job")
        text = msgspec.json.encode(request).decode()
        job = RolloutJob(
            id=job_id,
            owner=owner,
            key=key or job_id,
            body=msgspec.json.encode({"request": msgspec.Raw(text.encode()), "sign": sign}).decode(),
            run_id=new_id("run"),
            created_at=now,
            updated_at=now,
        )
        if await self._store.count_open_jobs(owner) >= self._quota:
            raise TooManyJobs(f"{owner} has {self._quota} jobs under way", hint="wait for one of them, or cancel it")
        kept = await self._store.add_job(job)
        if kept.id != job.id:
            if kept.body != job.body:
                raise JobConflict(f"the key {key!r} was used for another request")
            return kept, False
        assert self._group is not None, "jobs are taken while the service is open"
        self._group.start_soon(self._work, kept)
        return kept, True

    async def cancel(self, job: RolloutJob) -> RolloutJob:
        """Rollouts in flight end; those that ended stay. A job that is over stays as it is."""
        await self._store.move_job(job.id, "cancelled")
        if (scope := self._scopes.get(job.id)) is not None:
            scope.cancel()
        found = await self._store.get_job(job.id)
        assert found is not None
        return found

    async def _work(self, job: RolloutJob) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[job.id] = scope
            async with self._places:
                if not await self._store.move_job(job.id, "running"):
                    return  # it was cancelled while it waited
                try:
                    await self._run(job)
                    await self._store.move_job(job.id, "done")
                except Error as error:
                    self._log.warning("job.failed", job=job.id, error=str(error))
                    await self._store.move_job(job.id, "failed", error=str(error))
                except Exception as error:  # noqa: BLE001 - one job does not end the others; the cause is the operator's
                    self._log.exception("job.failed", job=job.id)
                    await self._store.move_job(job.id, "failed", error=f"the server failed: {type(error).__name__}")
        self._scopes.pop(job.id, None)
        await self._call_back(job)

    async def _run(self, job: RolloutJob) -> None:
        request = request_of(job)
        tasks = await anyio.to_thread.run_sync(tasks_of, request, self._server)
        config = config_of(request, self._server)
        run = Run(tasks, gate=self._gate, store=self._store, config=config, sandbox=self._backend, id=job.run_id)
        async with run:
            async for _ in run:
                pass  # the store has it; the caller that waits reads it there
        if stopped := await self._store.stopped_policies(job.run_id):
            raise ConfigError("; ".join(stopped.values()), hint="the policy's server failed; submit the job again")

    async def rollouts(self, job: RolloutJob) -> list[Rollout]:
        """Those that ended, whole."""
        if not await self._store.has_run(job.run_id):
            return []
        return [rollout async for rollout in self._store.rollouts(job.run_id, trajectories=True)]

    # the caller that asked to be told

    def _check_callback(self, url: str) -> None:
        if not _leads_to(url, self._server.callback_hosts):
            allowed = ", ".join(self._server.callback_hosts) or "none"
            raise ConfigError(f"no callback goes to {url}", hint=f"hosts that this server calls: {allowed}")

    async def _call_back(self, job: RolloutJob) -> None:
        """A signed POST, tried a few times; who needs certainty asks for the job."""
        url = request_of(job).callback
        found = await self._store.get_job(job.id)
        if url is None or found is None or not found.over:
            return
        body = msgspec.json.encode(
            {"job": found.id, "run_id": found.run_id, "state": found.state, "error": found.error}
        )
        pool = HttpPool(connect_s=_TELL_S, idle_s=1.0, max_body=_MAX_ANSWER)
        try:
            for wait in _CALLBACK_S:
                await anyio.sleep(wait)
                headers = {"content-type": "application/json", **signature(sign_key(job), body)}
                try:
                    answer = await pool.exchange("POST", url, body, headers, _TELL_S)
                except (OSError, TimeoutError, BadAnswer) as error:
                    self._log.warning("job.not_told", job=job.id, url=url, error=str(error))
                    continue
                if answer.status < 300:
                    return
                self._log.warning("job.not_told", job=job.id, url=url, status=answer.status)
        finally:
            await pool.aclose()


def _leads_to(url: str, hosts: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname in hosts and parts.port != 0
    except ValueError:
        return False


def request_of(job: RolloutJob) -> RolloutJobRequest:
    return msgspec.convert(msgspec.json.decode(job.body)["request"], RolloutJobRequest)


def sign_key(job: RolloutJob) -> str:
    """What the job's callback is signed with: made of its owner's key, so that the key itself is not kept."""
    return msgspec.json.decode(job.body)["sign"]


def signature(key: str, body: bytes, at: float | None = None) -> dict[str, str]:
    """The headers that prove who sent a body, and when."""
    moment = str(int(time.time() if at is None else at))
    digest = hmac.new(key.encode(), moment.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {"x-rollyard-timestamp": moment, "x-rollyard-signature": f"sha256={digest}"}
