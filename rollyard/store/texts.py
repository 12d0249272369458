"""What rollouts said and did, kept as texts that the database finds by their words: FTS5 on SQLite, tsvector on PostgreSQL.

Texts are put in when a rollout ends, in the transaction that keeps it. Rollouts of older stores, those that were judged
again, and those that were committed without their calls are put in by `search.index_missing`. Of a very long rollout the
first `MOST` characters are there, and a row says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
)

from rollyard.core.message import Message
from rollyard.core.rollout import Rollout
from rollyard.store.database import Put
from rollyard.store.schema import WORDS, rollouts, texts

Place = Literal["message", "tool call", "tool result", "log", "verdict", "failure", "diff"]
PLACES: tuple[Place, ...] = get_args(Place)
# Places of rows that are no text of the rollout: what it is called, and that texts are missing
TASK, CUT = ("task", "cut")
MOST = 2_000_000
_PIECE = 64_000  # characters of a row; PostgreSQL indexes no text that is much longer
_READ = 500  # rows at once: long ones may be a few hundred kB
_put_texts = Put(texts, ("rollout_id", "place", "call", "body"), there="fail")
_PHRASE = re.compile(r'"([^"]*)"|(\S+)')


class FoundText(NamedTuple):
    """A text that has the words, and the rollout it is of."""

    rollout_id: str
    run_id: str | None
    task_id: str
    attempt: int
    agent: str
    policy: str | None
    reward: float | None
    place: str
    call: int | None
    body: str


def texts_of(rollout: Rollout) -> Iterator[tuple[Place, str, int | None]]:
    """Each text once, with the number of the model call that first held it."""
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
    nodes, seen = trajectory.nodes, set[bytes]()
    for record in trajectory.records:
        for number in record.new_nodes:
            message = nodes[number].message
            if message.digest not in seen:
                seen.add(message.digest)
                for place, said in _parts(message):
                    yield place, said, record.seq


def _parts(message: Message) -> Iterator[tuple[Place, str]]:
    yield "message", f"{message.thinking}\n{message.text}"
    for call in message.tool_calls:
        yield "tool call", f"{call.name} {call.arguments}"
    for result in message.tool_results:
        yield "tool result", "".join(getattr(part, "text", "") for part in result.parts)


def put(connection: Connection, rollout: Rollout) -> None:
    """Replace a rollout's texts."""
    remove(connection, rollout.id)
    add(connection, rollout)


def add(connection: Connection, rollout: Rollout) -> None:
    """Keep the texts of a rollout that has none yet; nothing where its calls are not at hand."""
    if rollout.trajectory is None and rollout.calls:
        return
    named = " ".join((rollout.task.id, rollout.agent, rollout.labels.get("policy", "")))
    rows: list[tuple[str, str, int | None, str]] = [(rollout.id, TASK, None, named)]
    left = MOST
    for place, said, call in texts_of(rollout):
        if not said.strip():
            continue
        clean = said[:left].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
        rows += [(rollout.id, place, call, clean[at : at + _PIECE]) for at in range(0, len(clean), _PIECE)]
        left -= len(said)
        if left < 0:
            rows.append((rollout.id, CUT, None, ""))
            break
    _put_texts.rows(connection, rows)


def remove(connection: Connection, rollout_id: str) -> None:
    connection.execute(delete(texts).where(texts.c.rollout_id == rollout_id))


def list_missing(connection: Connection, limit: int | None = None) -> list[str]:
    """Rollouts whose texts are not in yet, the newest first."""
    named = texts.c.place == literal_column(f"'{TASK}'")  # as a constant: only so SQLite takes the index of such rows
    there = exists().where(texts.c.rollout_id == rollouts.c.id, named)
    query = select(rollouts.c.id).where(~there).order_by(rollouts.c.started_at.desc()).limit(limit)
    return list(connection.execute(query).scalars())


def find(connection: Connection, query: str, *, run_id: str | None = None, limit: int = 200) -> list[FoundText]:
    """Texts that have all words of `query`, those of rollouts that ended last first; words in double quotes stand together."""
    names = ("id", "run_id", "task_id", "attempt", "agent", "policy", "reward")
    columns = (*(rollouts.c[name] for name in names), texts.c.place, texts.c.call, texts.c.body)
    wanted = phrases(query)
    if not wanted:
        return []
    newest: ColumnElement[Any] = texts.c.id  # the number that a text was given when it was kept
    chosen = _find_matching(connection, wanted, select(*columns).join(rollouts, rollouts.c.id == texts.c.rollout_id))
    if run_id is not None:
        chosen = chosen.where(rollouts.c.run_id == run_id)
        if connection.dialect.name == "postgresql":
            newest = texts.c.id + 0  # by the number alone it would walk back through the texts of all other runs
    rows = connection.execute(chosen.order_by(newest.desc()).limit(limit))
    found: dict[str, list[FoundText]] = {}
    for row in rows:
        found.setdefault(row.id, []).append(FoundText(*row))
    return [one for of_rollout in found.values() for one in reversed(of_rollout)]


def candidates(connection: Connection, words: Sequence[str]) -> set[str]:
    """Rollouts with a text that has all these words, and those of which not every text is known."""
    found = set(connection.execute(_find_matching(connection, words, select(texts.c.rollout_id))).scalars())
    found |= set(connection.execute(select(texts.c.rollout_id).where(texts.c.place == CUT)).scalars())
    return found | set(list_missing(connection))


def find_matching(
    connection: Connection, ids: Sequence[str], pattern: re.Pattern[str], plain: str | None = None
) -> set[str]:
    """Those of the rollouts that have a line which matches, or of which that cannot be known here: their texts are not in, are
    cut, or one is kept in pieces. Where each such line has `plain` in it the database looks for that, and no text is read."""
    if plain is not None:
        return _find_plain(connection, ids, plain)
    query = select(texts.c.rollout_id, texts.c.place, texts.c.body).where(texts.c.rollout_id.in_(ids))
    seen, found = set[str](), set[str]()
    for rollout_id, place, body in connection.execute(query.execution_options(yield_per=_READ)):
        seen.add(rollout_id)
        if rollout_id in found or place == TASK:
            continue
        if place == CUT or len(body) >= _PIECE or "\ufffd" in body or any(map(pattern.search, body.splitlines())):
            found.add(rollout_id)
    return found | (set(ids) - seen)


def _find_plain(connection: Connection, ids: Sequence[str], plain: str) -> set[str]:
    place_of = func.instr if connection.dialect.name == "sqlite" else func.strpos
    holds = place_of(texts.c.body, plain) > 0
    found = or_(texts.c.place == CUT, func.length(texts.c.body) >= _PIECE, holds) & (texts.c.place != TASK)
    query = select(texts.c.rollout_id, func.max(case((found, 1), else_=0))).where(texts.c.rollout_id.in_(ids))
    rows = connection.execute(query.group_by(texts.c.rollout_id)).all()
    return {rollout_id for rollout_id, holds in rows if holds} | (set(ids) - {rollout_id for rollout_id, _ in rows})


def phrases(query: str) -> list[str]:
    found = [quoted or word.replace('"', "") for quoted, word in _PHRASE.findall(query)]
    return [phrase for phrase in found if re.search(r"[^\W_]", phrase)]


def _find_matching(connection: Connection, wanted: Sequence[str], query: Select[Any]) -> Select[Any]:
    if connection.dialect.name == "sqlite":
        match = " ".join(f'"{phrase}"' for phrase in wanted)
        rows = select(literal_column("rowid")).select_from(text(WORDS)).where(text(f"{WORDS} MATCH :match"))
        return query.where(texts.c.id.in_(rows.params(match=match)))
    vector = func.to_tsvector(literal_column("'simple'"), texts.c.body)
    return query.where(
        and_(*(vector.op("@@")(func.phraseto_tsquery(literal_column("'simple'"), phrase)) for phrase in wanted))
    )
