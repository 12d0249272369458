"""Who works on the sessions of jobs: a loop per replica that claims what is due, and holds it while a `Runner` is at it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from rollyard.core.errors import Error
from rollyard.core.log import Log
from rollyard.core.plane import PlaneRecord
from rollyard.plane.compat.fleet.errors import FleetRefusal
from rollyard.plane.compat.fleet.instances import FleetCreate, WorldInstances
from rollyard.plane.compat.fleet.jobs import (
    FleetServerJob,
    FleetSession,
    JobAttempt,
    JobOutcome,
    Jobs,
    Runner,
    session_id,
)
from rollyard.plane.service.typed_records import TypedRecord

T = TypeVar("T")
_log = Log("rollyard.fleet")
SESSION = "rollyard.fleet.session"  # the label of a session's instance
_MOST_LOST = 3  # a session that its server did not survive so often is not begun again
_LOOK_S = 2.0


class JobWorker:
    """`parallel` is how many sessions work here at once, whatever a job asks for. A session is held for `hold_s`, and again while
    it is worked on: so long after the death of its worker another takes it up."""

    def __init__(
        self, jobs: Jobs, places: WorldInstances, runner: Runner, *, parallel: int = 4, hold_s: float = 30.0
    ) -> None:
        self._jobs, self._places, self._runner = jobs, places, runner
        self._parallel, self._hold_s = parallel, hold_s
        self._working: set[asyncio.Task[None]] = set()

    async def forever(self) -> None:
        """Until it is cancelled; then every session that is worked on here is given back."""
        try:
            while True:
                idle_s = _LOOK_S
                try:
                    idle_s = await self._work_once()
                except Exception:  # noqa: BLE001 - recorded; storage that fails for a while must not end the work
                    _log.exception("sessions could not be claimed")
                await self._wait(idle_s)
        finally:
            for work in self._working:
                work.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)

    async def _work_once(self) -> float:
        """How long there is nothing to do here, as far as is known."""
        self._jobs.wanted.clear()
        room, due_at = self._parallel - len(self._working), await self._jobs.sessions.next_due()
        if room < 1 or due_at is None:
            return _LOOK_S
        if due_at > (now := self._jobs.clock()):
            return min(_LOOK_S, due_at - now)
        for claimed in await self._jobs.sessions.claim(self._hold_s, room):
            work = asyncio.create_task(self._work(claimed))
            self._working.add(work)
            work.add_done_callback(self._forget)
        return 0.0

    async def _wait(self, idle_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(idle_s):
                await self._jobs.wanted.wait()

    def _forget(self, work: asyncio.Task[None]) -> None:
        self._working.discard(work)
        self._jobs.wanted.set()  # there is room again
        if not work.cancelled() and (error := work.exception()) is not None:
            _log.warning("a session was left to the next worker", cause=str(error))

    async def _work(self, claimed: TypedRecord[FleetSession]) -> None:
        session = claimed.value
        job = await self._jobs.find(session.owner, session.job_id)
        if session.begun:
            reason = "its session is begun again"
            await self._places.close_labelled(session.owner, {SESSION: session.id}, reason)
        lost = session.lost + (session.status == "running")  # who gives one back says that it is pending
        if lost >= _MOST_LOST:
            message = f"{lost} servers ended while they worked on it"
            await self._end(claimed, job, replace(session, status="failed", lost=lost, error=message), ())
            return
        begun = replace(
            session,
            status="running",
            lost=lost,
            begun=session.begun + 1,
            started_at=session.started_at or self._jobs.clock(),
        )
        held = _Held(self._jobs, claimed, self._hold_s)
        if not await held.begin(begun):
            return
        try:
            ended, lines = await held.run_during(self._attempt(job, begun))
        except asyncio.CancelledError:
            if not held.lost:  # this server stops: the next one begins it anew
                back = self._jobs.sessions.change(
                    held.kept, replace(begun, status="pending"), due_at=self._jobs.clock()
                )
                await asyncio.shield(self._jobs.sessions.write(back))
            raise
        await self._end(held.kept, job, ended, lines)

    async def _attempt(self, job: FleetServerJob, session: FleetSession) -> tuple[FleetSession, tuple[Any, ...]]:
        """How it ended, and what was said."""
        try:
            async with asyncio.timeout(job.ends_at - self._jobs.clock()):
                done = await self._run(job, session)
        except TimeoutError:
            return replace(session, status="cancelled", error="its job's time was over"), ()
        except (Error, FleetRefusal, OSError) as error:
            _log.warning("a session failed", job=job.id, session=session.id, cause=str(error))
            return replace(session, status="failed", error=str(error) or type(error).__name__), ()
        status = "completed" if done.error is None else "failed"
        ended = replace(session, status=status, steps=done.steps, checked=done.checked, error=done.error)
        return ended, done.transcript

    async def _run(self, job: FleetServerJob, session: FleetSession) -> JobOutcome:
        task, wanted = job.tasks[session.task_key], job.asked
        seconds = job.ends_at - self._jobs.clock()
        make = FleetCreate(
            env_key=task.env,
            env_version=task.version,
            data_key=task.data_id,
            data_version=task.data_version,
            env_variables=task.env_variables,
            ttl_seconds=max(60, round(seconds) + 60),
            run_id=job.id,
        )
        rollout_id = session.id if session.begun == 1 else f"{session.id}-{session.begun}"
        place = await self._places.make(job.owner, make, None, {SESSION: session.id}, rollout_id=rollout_id)
        try:
            return await self._runner(
                JobAttempt(
                    rollout_id=rollout_id,
                    job_id=job.id,
                    task=task,
                    model=session.model,
                    place=place,
                    harness=wanted.harness,
                    system_prompt=wanted.model_prompts.get(session.model, wanted.system_prompt),
                    max_steps=wanted.max_steps,
                    seconds=seconds,
                )
            )
        finally:
            await asyncio.shield(self._places.close(place, "its session is over"))

    async def _end(
        self, kept: TypedRecord[FleetSession], job: FleetServerJob, ended: FleetSession, lines: tuple[Any, ...]
    ) -> None:
        """The session's end, what was said and the session that may begin now: all of it is written or nothing."""
        ended = replace(ended, ended_at=self._jobs.clock())
        while True:
            records = [self._jobs.sessions.change(kept, ended), *await self._follower(job, ended)]
            if lines and await self._jobs.transcripts.get(job.owner, ended.id) is None:
                records.append(self._jobs.transcripts.draft(job.owner, ended.id, list(lines)))
            if await self._jobs.sessions.write(*records):
                return
            found = await self._jobs.sessions.get(job.id, ended.id)
            if found is None or found.record.revision != kept.record.revision:
                _log.warning("another worker has taken a session up", session=ended.id)
                return

    async def _follower(self, job: FleetServerJob, ended: FleetSession) -> list[PlaneRecord]:
        number = job.follower(ended)
        next_one = None if number is None else await self._jobs.sessions.get(job.id, session_id(job.id, number))
        if next_one is None or next_one.value.status != "pending":
            return []
        return [self._jobs.sessions.change(next_one, next_one.value, due_at=self._jobs.clock())]


class _Held:
    """A session that is this worker's for as long as it says so in time."""

    def __init__(self, jobs: Jobs, kept: TypedRecord[FleetSession], hold_s: float) -> None:
        self._sessions, self.kept, self._hold_s = jobs.sessions, kept, hold_s
        self.lost = False
        self._over = asyncio.Event()

    async def begin(self, value: FleetSession) -> bool:
        """Another's by now: False."""
        return await self._write(TypedRecord(value=value, record=self._sessions.change(self.kept, value)))

    async def _write(self, kept: TypedRecord[FleetSession]) -> bool:
        held = await self._sessions.hold(kept, self._hold_s)
        if held is None:
            self.lost = True
            return False
        self.kept = held
        return True

    async def run_during(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. It is cancelled when another has taken the session up."""
        working = asyncio.ensure_future(work)
        renewing = asyncio.create_task(self._renew(working))
        try:
            return await working
        finally:
            self._over.set()
            await asyncio.shield(renewing)

    async def _renew(self, working: asyncio.Future[Any]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._hold_s / 3):
                    await self._over.wait()
                    return
            try:
                if not await self._write(self.kept):
                    working.cancel()
                    return
            except Error as error:
                _log.warning("a session could not be held on to", session=self.kept.value.id, cause=str(error))
