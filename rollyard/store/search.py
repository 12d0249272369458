"""Finding a text in what rollouts said and did: transcripts, tool calls, logs, verdicts, failures, file changes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.store.store import Store
from rollyard.store.values import RolloutQuery

Place = Literal["message", "tool call", "tool result", "log", "verdict", "failure", "diff"]
PLACES: tuple[Place, ...] = ("message", "tool call", "tool result", "log", "verdict", "failure", "diff")
_PAGE = 100


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A line with the text. `call` is the number of the model call whose answer or history first held it."""

    rollout_id: str
    task_id: str
    agent: str
    place: Place
    line: str
    call: int | None = None


def compile_text(text: str, *, regex: bool, ignore_case: bool) -> re.Pattern[str]:
    try:
        return re.compile(text if regex else re.escape(text), re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ConfigError(
            f"{text!r} is no regular expression: {error}", hint="leave out --regex for plain text"
        ) from error


async def search(store: Store, pattern: re.Pattern[str], *, run_id: str | None = None) -> AsyncIterator[Found]:
    """Every line that matches, rollout by rollout in the order they began; one rollout is in memory at a time."""
    offset: int | None = 0
    while offset is not None:
        page = await store.list_rollouts(RolloutQuery(run_id=run_id, limit=_PAGE, offset=offset))
        for row in page.rows:
            rollout = await store.get_rollout(row.id)
            for place, line, call in _lines(rollout):
                if pattern.search(line):
                    yield Found(
                        rollout_id=rollout.id, task_id=rollout.task.id, agent=rollout.agent,
                        place=place, line=line, call=call,
                    )  # fmt: skip
        offset = page.next


def _lines(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    for place, text, call in _texts(rollout):
        for line in text.splitlines():
            if line.strip():
                yield place, line, call


def _texts(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    yield from _transcript(rollout)
    yield "log", rollout.log.decode("utf-8", "backslashreplace"), None
    if rollout.verdict is not None:
        yield "verdict", rollout.verdict.log, None
        yield "verdict", rollout.verdict.error or "", None
        for command in rollout.verdict.commands:
            yield "verdict", f"{command.stdout}\n{command.stderr}", None
    if rollout.failure is not None:
        yield "failure", rollout.failure.message, None
    yield "diff", rollout.diff or "", None


def _transcript(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    """Each message once, though every later call repeats it in its history."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return
    seen: set[bytes] = set()
    for record in trajectory.records:
        answer = trajectory.answer(record.id)
        for message in (*trajectory.messages(record.id), *(() if answer is None else (answer.message,))):
            if message.digest in seen:
                continue
            seen.add(message.digest)
            for place, text in _parts(message):
                yield place, text, record.seq


def _parts(message: Message) -> Iterator[tuple[Place, str]]:
    yield "message", f"{message.thinking}\n{message.text}"
    for call in message.tool_calls:
        yield "tool call", f"{call.name} {call.arguments}"
    for result in message.tool_results:
        yield "tool result", "".join(getattr(part, "text", "") for part in result.parts)
