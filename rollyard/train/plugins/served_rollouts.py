"""`ServedRollouts`: rollouts of a `rollyard serve rollouts` for a trainer's plug-in, and the trainer's own engine as
their model.

    rollouts = ServedRollouts("http://runner:8800")
    group = await rollouts.group(task, attempts=8, generate=generate)

`task` is a row as a JSON Lines file has it, or `{"taskset": NAME, "task": ID}` for one of the server's own; JSON text
does as well, since a column of text survives every dataset format. With `generate` the trainer answers the agents'
calls, token by token (the server has `--policy queue#renderer=MODEL`); without it the server asks its own model
(`--base-url`).

The caller that waits for a rollout answers calls, of any rollout: a server with one queue needs no trainer that knows which
are its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from glob import escape
from typing import Any, NamedTuple

import anyio
import msgspec

from rollyard.core.errors import ConfigError, Error
from rollyard.store.exports.lines import read_sample
from rollyard.train.rollouts_client import RolloutsClient, RolloutsRefused
from rollyard.trajectory.samples import Sample

URL_VARIABLE, KEY_VARIABLE = "ROLLYARD_ROLLOUTS_URL", "ROLLYARD_ROLLOUTS_KEY"
_CANCEL_S = 10.0
_TAKE_S = 1.0  # of one long poll: what was taken is answered, so a poll is never cut off


class Generation(NamedTuple):
    """What the trainer's engine sampled for one call; `version` is that of its weights, where it knows."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    version: int | None = None


HeldCall = Mapping[str, Any]  # as `GET /v1/calls` gives it: call_id, session_id, prompt_ids, sampling, ...
TaskRow = Mapping[str, Any] | str
Generate = Callable[[Sequence[HeldCall]], Awaitable[Sequence[Generation]]]


def one_by_one(sample: Callable[[HeldCall], Awaitable[Generation]]) -> Generate:
    """`generate` of an engine that samples one call at a time; it batches what it is asked at once itself."""

    async def generate(calls: Sequence[HeldCall]) -> list[Generation]:
        return list(await asyncio.gather(*(sample(call) for call in calls)))

    return generate


class RolloutsFailed(Error):
    """A group of which nothing, or not all that its trainer needs, can be trained on."""


class ServedGroup(NamedTuple):
    """The rows of each attempt, () where there are none, and then `left_out` says why: `attempt`, `reasons`."""

    rollouts: tuple[tuple[Sample, ...], ...]
    left_out: list[dict[str, Any]]

    def only_rows(self) -> tuple[Sample, ...]:
        """The rows of the one rollout there is, for trainers that take a rollout or an error and nothing between."""
        if self.left_out:
            raise RolloutsFailed(f"the rollout cannot be trained on: {', '.join(self.left_out[0]['reasons'])}")
        return self.rollouts[0]


class ServedRollouts:
    """`job` are further fields of every job: `agents`, `options`, `retries`, `parallel`. URL and key may come by
    ROLLYARD_ROLLOUTS_URL and ROLLYARD_ROLLOUTS_KEY, for trainers that load a plug-in by its name alone."""

    def __init__(self, url: str | None = None, key: str | None = None, *, job: Mapping[str, Any] | None = None) -> None:
        found = url or os.environ.get(URL_VARIABLE)
        if not found:
            raise ConfigError("where is the server of rollouts?", hint=f"give url, or set {URL_VARIABLE}")
        self._url, self._key = found, key or os.environ.get(KEY_VARIABLE)
        self._job = dict(job or {})

    async def group(self, task: TaskRow, *, attempts: int = 1, generate: Generate | None = None) -> ServedGroup:
        """`attempts` rollouts of one task."""
        answer = await self._rows(task, "samples", attempts, generate)
        found: list[list[Sample]] = [[] for _ in range(attempts)]
        for line in answer["rows"]:
            found[line["attempt"]].append(read_sample(line))
        return ServedGroup(tuple(tuple(rows) for rows in found), answer["left_out"])

    async def rows(
        self, task: TaskRow, format: str, *, attempts: int = 1, generate: Generate | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """The same in a format of `rollyard.train.formats`, and what is left out."""
        answer = await self._rows(task, format, attempts, generate)
        return answer["rows"], answer["left_out"]

    async def publish(self, version: int) -> None:
        """Answers are of this version of the weights from now on."""
        async with RolloutsClient(self._url, self._key) as client:
            await client.publish(version)

    async def _rows(self, task: TaskRow, format: str, attempts: int, generate: Generate | None) -> dict[str, Any]:
        async with RolloutsClient(self._url, self._key) as client:
            job = await client.submit(attempts=attempts, **{**self._job, **job_fields(task)})
            try:
                ended = await _wait(client, job["id"], generate)
            except BaseException:  # cancelled too: what its agents would do is not read
                with anyio.CancelScope(shield=True), anyio.move_on_after(_CANCEL_S):
                    await client.cancel(job["id"])
                raise
            if ended["state"] != "done":
                raise RolloutsFailed(
                    f"job {job['id']} ended as {ended['state']}: {ended['error'] or 'no reason given'}"
                )
            return await client.row_answer(job["id"], format)


async def _wait(client: RolloutsClient, job_id: str, generate: Generate | None) -> dict[str, Any]:
    """The job once it is over; meanwhile calls are answered."""
    if generate is None:
        return await client.wait(job_id)
    over = anyio.Event()
    ended: dict[str, Any] = {}
    try:
        async with anyio.create_task_group() as work:
            work.start_soon(_answer_calls, client, generate, over)
            ended = await client.wait(job_id)
            over.set()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    return ended


def _first(error: BaseException) -> BaseException:
    """The engine's own error, which a trainer knows, and not the group it came in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def job_fields(task: TaskRow) -> dict[str, Any]:
    """The part of a job that names its task."""
    found: Any = msgspec.json.decode(task) if isinstance(task, str) else dict(task)
    if not isinstance(found, dict):
        raise ConfigError(f"a task is a row or its JSON, got {task!r}")
    if set(found) == {"taskset", "task"}:  # pyright: ignore[reportUnknownArgumentType]
        return {"taskset": found["taskset"], "filter": [escape(found["task"])]}
    return {"tasks": [{name: value for name, value in found.items() if value is not None}]}  # pyright: ignore[reportUnknownVariableType]


async def _answer_calls(client: RolloutsClient, generate: Generate, over: anyio.Event) -> None:
    """Until the job is over: take what waits, sample it, and take more meanwhile."""
    async with anyio.create_task_group() as answering:
        while not over.is_set():
            calls = await client.take(wait=_TAKE_S)
            if calls:
                answering.start_soon(_answer, client, generate, calls)


async def _answer(client: RolloutsClient, generate: Generate, calls: Sequence[HeldCall]) -> None:
    missing = [call["call_id"] for call in calls if call["prompt_ids"] is None]
    if missing:
        raise ConfigError("the server's calls have no prompt in ids", hint="serve with --policy queue#renderer=MODEL")
    made = await generate(calls)
    for call, one in zip(calls, made, strict=True):
        try:
            await client.reply(call["call_id"], ids=one.ids, logprobs=one.logprobs, version=one.version)
        except RolloutsRefused as error:
            if error.status != 409:  # its rollout has ended meanwhile: this answer is not awaited
                raise
