"""Finding a text in what rollouts said and did: line by line with a pattern, or by words in the database's index."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, select

from rollyard.core.errors import ConfigError
from rollyard.core.rollout import Rollout
from rollyard.store import texts
from rollyard.store.schema import rollouts
from rollyard.store.store import Store
from rollyard.store.texts import Place

_PAGE = 500
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


class SoughtText(NamedTuple):
    """`pattern` decides about a line. Where each line that it matches has `words` on it, or `plain`, the database looks for these
    first."""

    pattern: re.Pattern[str]
    words: tuple[str, ...] = ()
    plain: str | None = None


def compile_text(text: str, *, regex: bool, ignore_case: bool) -> SoughtText:
    try:
        pattern = re.compile(text if regex else re.escape(text), re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ConfigError(
            f"{text!r} is no regular expression: {error}", hint="leave out --regex for plain text"
        ) from error
    if regex:
        return SoughtText(pattern)
    if text and not ignore_case and text.isprintable():  # what no database takes is not printable
        return SoughtText(pattern, plain=text)
    return SoughtText(pattern, words=tuple(_find_whole_words(text)))


def _find_whole_words(text: str) -> list[str]:
    """Words that stand whole wherever the text does, since it has spaces on both sides of them."""
    return _WHOLE.findall(text)


async def search(store: Store, sought: SoughtText, *, run_id: str | None = None) -> AsyncIterator[Found]:
    """Every line that matches, rollout by rollout in the order of their ids. One rollout is in memory at a time, and those alone
    are read whole whose kept texts match."""
    likely = await store.rollouts_with(sought.words) if sought.words else None
    last = ""
    while rows := await store.database.read(partial(_next_rows, run_id=run_id, last=last)):
        last = rows[-1][0]
        policies = {id: policy for id, policy in rows if likely is None or id in likely}
        find = partial(texts.find_matching, ids=list(policies), pattern=sought.pattern, plain=sought.plain)
        having = await store.database.read(find)
        for id in [id for id in policies if id in having]:
            rollout = await store.get_rollout(id)
            for place, line, call in _lines(rollout):
                if sought.pattern.search(line):
                    yield Found(
                        rollout_id=id, task_id=rollout.task.id, agent=rollout.agent, policy=policies[id],
                        place=place, line=line, call=call,
                    )  # fmt: skip


def _next_rows(connection: Connection, run_id: str | None, last: str) -> list[tuple[str, str | None]]:
    query = select(rollouts.c.id, rollouts.c.policy).where(rollouts.c.id > last)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    return [(row.id, row.policy) for row in connection.execute(query.order_by(rollouts.c.id).limit(_PAGE))]


def _lines(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    for place, text, call in texts.texts_of(rollout):
        for line in text.splitlines():
            if line.strip():
                yield place, line, call


async def index_missing(store: Store, *, limit: int) -> int:
    """Put in the texts of at most `limit` rollouts that have none yet; gives how many of those are left to do."""
    waiting = await store.missing_texts()
    for rollout_id in waiting[:limit]:
        await store.database.write(partial(texts.put, rollout=await store.get_rollout(rollout_id)))
    return max(0, len(waiting) - limit)


def matching_line(body: str, query: str) -> str:
    """The line of a text that shows best why it was found."""
    wanted = [phrase.lower() for phrase in texts.phrases(query)]
    lines = [line for line in body.splitlines() if line.strip()]
    return max(lines, key=lambda line: sum(phrase in line.lower() for phrase in wanted), default="").strip()
