"""The HTTP API of `serve rollouts`: jobs, their rows, and the trainer's half of the gate, under one key and one version.

Errors are `{"error": {"code", "message", "hint"}}`. A request that is repeated under the same `Idempotency-Key` finds its job.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, Error, UnknownName, Untrainable
from rollyard.core.events import COMMITTED
from rollyard.core.rollout import Rollout
from rollyard.core.rollout_job import RolloutJob
from rollyard.gate import Gate
from rollyard.gate.keys import key_of, same_key
from rollyard.gate.operator_request import answer
from rollyard.gate.trainer import Trainer
from rollyard.store import Store
from rollyard.store.exports.lines import attempt_line
from rollyard.train.formats import FORMATS, write_rows
from rollyard.train.service.jobs import JobConflict, RolloutJobs, TooManyJobs, request_of
from rollyard.train.service.request import RolloutJobRequest

MAX_WAIT_S = 60.0
LOCAL = "local"  # the owner where no key is asked for
_LOOK_S = 0.25
_MAX_BODY = 32 * 2**20


class JobNotFound(Error):
    """No such job, or another owner's, which is the same to the caller."""


class RolloutsApi:
    """`keys` are owners by their keys; without any, every caller is the same owner. Held calls are of
    all owners' jobs, so one of them, the `trainer`, takes and answers them."""

    def __init__(
        self, jobs: RolloutJobs, store: Store, gate: Gate, keys: Mapping[str, str], trainer: str = LOCAL
    ) -> None:
        self._jobs, self._store, self._keys, self._trainer = jobs, store, keys, trainer
        one = "/v1/jobs/{job_id}"
        trainers_own = [
            Route(f"/v1{path}", self._guard(self._for_the_trainer(endpoint)), methods=[method])
            for path, method, endpoint in Trainer(gate).endpoints
        ]
        self.app = Starlette(
            routes=[
                Route("/health", _health),
                Route("/openapi.json", _openapi),
                Route("/v1/jobs", self._guard(self._submit), methods=["POST"]),
                Route("/v1/jobs", self._guard(self._list)),
                Route(one, self._guard(self._show)),
                Route(one, self._guard(self._cancel), methods=["DELETE"]),
                Route(f"{one}/rollouts", self._guard(self._rollouts)),
                Route(f"{one}/rows", self._guard(self._rows)),
                Route(f"{one}/events", self._guard(self._events)),
                *trainers_own,
            ]
        )

    def _guard(self, endpoint: Any) -> Any:
        async def guard(request: Request) -> Response:
            try:
                request.state.owner = self._owner(request)
                return await endpoint(request)
            except _Unauthorized:
                return _refuse(401, "unauthorized", "the key is missing or wrong", None)
            except JobNotFound as error:
                return _refuse(404, "not_found", error.message, error.hint)
            except JobConflict as error:
                return _refuse(409, "conflict", error.message, error.hint)
            except TooManyJobs as error:
                return _refuse(429, "quota_exceeded", error.message, error.hint)
            except Untrainable as error:
                return _refuse(422, "untrainable", error.message, error.hint)
            except (ConfigError, UnknownName) as error:
                return _refuse(400, "invalid", error.message, error.hint)
            except BAD_JSON as error:
                return _refuse(400, "invalid", str(error), None)

        return guard

    def _for_the_trainer(self, endpoint: Any) -> Any:
        async def ask(request: Request) -> Response:
            if request.state.owner != self._trainer:
                return _refuse(403, "forbidden", "the calls of this server are its trainer's", "see --trainer")
            given = await answer(endpoint, request)
            if given.status_code < 400:
                return given
            code = "conflict" if given.status_code == 409 else "invalid"
            return _refuse(given.status_code, code, msgspec.json.decode(bytes(given.body))["error"], None)

        return ask

    def _owner(self, request: Request) -> str:
        if not self._keys:
            request.state.key = LOCAL
            return LOCAL
        given = key_of(dict(request.headers.raw), b"")
        for key, owner in self._keys.items():
            if same_key(given, key):
                request.state.key = key
                return owner
        raise _Unauthorized

    # jobs

    async def _submit(self, request: Request) -> Response:
        body = await _body(request)
        key = request.headers.get("idempotency-key")
        sign = hmac.new(request.state.key.encode(), b"rollyard callback", hashlib.sha256).hexdigest()
        job, new = await self._jobs.submit(request.state.owner, key, body, sign)
        return JSONResponse(await self._view(job), 201 if new else 200)

    async def _list(self, request: Request) -> Response:
        limit = int(_read_number(request, "limit", 100, 1, 1000))
        after = request.query_params.get("after", "")
        found = await self._store.jobs(owner=request.state.owner, after=after, limit=limit)
        return JSONResponse(
            {"jobs": [_summary(job) for job in found], "after": found[-1].id if len(found) == limit else None}
        )

    async def _show(self, request: Request) -> Response:
        """`?wait=` seconds for the job to be over; the answer comes at once when it is."""
        job = await self._job(request)
        with anyio.move_on_after(_read_number(request, "wait", 0, 0, MAX_WAIT_S)):
            while not job.over:
                await anyio.sleep(_LOOK_S)
                job = await self._job(request)
        return JSONResponse(await self._view(job))

    async def _cancel(self, request: Request) -> Response:
        return JSONResponse(await self._view(await self._jobs.cancel(await self._job(request))))

    async def _rollouts(self, request: Request) -> Response:
        """One line for each that ended, in the order they were begun."""
        job = await self._job(request)
        return JSONResponse({"rollouts": [attempt_line(found) for found in await self._jobs.rollouts(job)]})

    async def _rows(self, request: Request) -> Response:
        """Rows of what has ended, for the trainer that `?format=` names; `?group=` for those of one group alone. A rollout that
        gives none is named, with the reason."""
        format = request.query_params.get("format", "samples")
        if format not in FORMATS:
            raise UnknownName("row format", format, tuple(FORMATS))
        group = request.query_params.get("group")
        ended = [r for r in await self._jobs.rollouts(await self._job(request)) if group in (None, r.group_id)]
        kept, left_out = sort_out(ended)
        return JSONResponse({"format": format, "rows": write_rows(format, kept), "left_out": left_out})

    async def _events(self, request: Request) -> Response:
        """Server-sent events: `rollout` for each that ended, `end` when the job is over. Their ids are those of the store's
        events, so that a reader that was cut off goes on with `Last-Event-ID`."""
        job = await self._job(request)
        try:
            after = int(request.headers.get("last-event-id", "0"))
        except ValueError:
            raise ConfigError("Last-Event-ID is not the number of an event") from None
        return StreamingResponse(self._stream(job, after), media_type="text/event-stream")

    async def _stream(self, job: RolloutJob, after: int) -> AsyncIterator[bytes]:
        while True:
            found = await self._store.get_job(job.id)
            over = found is None or found.over
            for stored in await self._store.events(run_id=job.run_id, name=COMMITTED, after=after):
                after = stored.seq
                fields = {"rollout_id": stored.event.rollout_id, **stored.event.fields}
                yield _sse("rollout", fields, stored.seq)
            if over and not await self._store.has_more_events(job.run_id, name=COMMITTED, after=after):
                yield _sse("end", _summary(found or job), after)
                return
            yield b": \n\n"  # a reader that is gone is seen by this
            await anyio.sleep(_LOOK_S)

    async def _job(self, request: Request) -> RolloutJob:
        found = await self._store.get_job(request.path_params["job_id"])
        if found is None or found.owner != request.state.owner:
            raise JobNotFound(f"there is no job {request.path_params['job_id']}")
        return found

    async def _view(self, job: RolloutJob) -> dict[str, Any]:
        counts = await self._store.progress(job.run_id)
        return {**_summary(job), "attempts": dict(counts), "request": msgspec.to_builtins(request_of(job))}


class _Unauthorized(Exception):
    pass


def sort_out(ended: list[Rollout]) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """Rollouts that give rows, and the others with their reasons. A baseline is over those that are left, and their names say
    which are not."""
    kept: list[Rollout] = []
    left_out: list[dict[str, Any]] = []
    for rollout in ended:
        reasons: tuple[str, ...] = ()
        if rollout.reward is None:
            failure = rollout.failure
            reasons = ("no reward" if failure is None else f"no reward: {failure.message}",)
        else:
            try:
                write_rows("samples", [rollout])
            except Untrainable as error:
                reasons = error.reasons
        if reasons:
            named = {"rollout_id": rollout.id, "group_id": rollout.group_id, "task_id": rollout.task.id}
            left_out.append({**named, "attempt": rollout.attempt, "reward": rollout.reward, "reasons": list(reasons)})
        else:
            kept.append(rollout)
    return kept, left_out


def _summary(job: RolloutJob) -> dict[str, Any]:
    names = ("id", "run_id", "state", "error", "created_at", "updated_at")
    return {name: getattr(job, name) for name in names}


def _read_number(request: Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
        if not least <= value <= most:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{name}={text}: a number from {least:g} to {most:g}") from None
    return value


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for data in request.stream():
        found += data
        if len(found) > _MAX_BODY:
            raise ConfigError(f"the request is larger than {_MAX_BODY >> 20} MB")
    return bytes(found)


def _sse(name: str, fields: Mapping[str, Any], number: int) -> bytes:
    return f"id: {number}\nevent: {name}\ndata: ".encode() + msgspec.json.encode(fields) + b"\n\n"


def _refuse(status: int, code: str, message: str, hint: str | None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message, "hint": hint}}, status)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _openapi(request: Request) -> Response:
    from rollyard.train.service.openapi import document

    return JSONResponse(document(RolloutJobRequest))
