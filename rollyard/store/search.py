"""Finding a text in what rollouts said and did: line by line with a pattern, or by words in the database's index."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from functools import partial

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.rollout import Rollout
from rollyard.store import texts
from rollyard.store.store import Store
from rollyard.store.texts import Place
from rollyard.store.values import RolloutQuery

_PAGE = 100
_WHOLE = re.compile(r"(?<=\s)[A-Za-z]+(?=\s)")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A line with the text. `call` is the number of the model call whose answer or history first held it."""

    rollout_id: str
    task_id: str
    agent: str
    policy: str | None = None  # where the run has several
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


def whole_words(text: str) -> list[str]:
    """Words that stand whole wherever the text does, since it has spaces on both sides of them."""
    return _WHOLE.findall(text)


async def search(
    store: Store, pattern: re.Pattern[str], *, run_id: str | None = None, words: list[str] | None = None
) -> AsyncIterator[Found]:
    """Every line that matches, rollout by rollout in the order they began; one rollout is in memory at a time. `words` are
    known to be on each such line: rollouts that lack them are not read."""
    likely = await store.rollouts_with(words) if words else None
    offset: int | None = 0
    while offset is not None:
        page = await store.list_rollouts(RolloutQuery(run_id=run_id, limit=_PAGE, offset=offset))
        for row in page.rows:
            if likely is not None and row.id not in likely:
                continue
            rollout = await store.get_rollout(row.id)
            for place, line, call in _lines(rollout):
                if pattern.search(line):
                    yield Found(
                        rollout_id=rollout.id, task_id=rollout.task.id, agent=rollout.agent, policy=row.policy,
                        place=place, line=line, call=call,
                    )  # fmt: skip
        offset = page.next


def _lines(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    for place, text, call in texts.texts_of(rollout):
        for line in text.splitlines():
            if line.strip():
                yield place, line, call


async def index_missing(store: Store, *, limit: int) -> int:
    """Put in the texts of at most `limit` rollouts that have none yet; gives how many of those are left to do."""
    waiting = await store.missing_texts(limit + 1_000_000)
    for rollout_id in waiting[:limit]:
        await store.database.write(partial(texts.put, rollout=await store.get_rollout(rollout_id)))
    return max(0, len(waiting) - limit)


def matching_line(body: str, query: str) -> str:
    """The line of a text that shows best why it was found."""
    wanted = [phrase.lower() for phrase in texts.phrases(query)]
    lines = [line for line in body.splitlines() if line.strip()]
    return max(lines, key=lambda line: sum(phrase in line.lower() for phrase in wanted), default="").strip()
