"""Finding by id, by the start of one or by name, and removing runs."""

from __future__ import annotations

from difflib import get_close_matches

import msgspec
from sqlalchemy import Connection, delete, select

from rollyard.core.errors import StoreError
from rollyard.core.ids import LAST, SHORT
from rollyard.store.schema import (
    artifacts,
    attempts,
    calls,
    events,
    notes,
    pauses,
    rollouts,
    runs,
    sessions,
    texts,
    verdicts,
)

_OF_ROLLOUTS = (calls, verdicts, artifacts, notes, texts, events, sessions)
_SHOWN = 5
_NEWEST = 200  # runs whose names are held against one that is not there


def resolve(connection: Connection, text: str) -> tuple[str, str]:
    """A run or rollout by its id, the unique start of one, the name of a run (the newest of that name), the unique end of
    an id (`short_id`), or `last`: `("run" | "rollout", id)`."""
    if not text:
        raise StoreError("an empty text names no run or rollout", hint="`rollyard list` shows those there are")
    if text == LAST:
        newest = connection.execute(select(runs.c.id).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(1))
        if (found_id := newest.scalar()) is None:
            raise StoreError("there is no run yet", hint="rollyard run makes one")
        return "run", found_id
    found: list[tuple[str, str]] = []
    for kind, table in (("run", runs), ("rollout", rollouts)):
        query = select(table.c.id).where(table.c.id.startswith(text, autoescape=True)).limit(_SHOWN)
        ids = list(connection.execute(query).scalars())
        if text in ids:
            return kind, text
        found += [(kind, found_id) for found_id in ids]
    if not found and (named := _run_by_name(connection, text)) is not None:
        return "run", named
    if not found and len(text) >= SHORT:
        for kind, table in (("run", runs), ("rollout", rollouts)):
            query = select(table.c.id).where(table.c.id.endswith(text, autoescape=True)).limit(_SHOWN)
            found += [(kind, found_id) for found_id in connection.execute(query).scalars()]
    if not found:
        near = get_close_matches(text, _names(connection), n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise StoreError(f"no run or rollout is named {text}{guess}", hint="`rollyard list` shows those there are")
    if len(found) > 1:
        raise StoreError(f"{text} could be {', '.join(name for _, name in found)}", hint="give more of the id")
    return found[0]


def _names(connection: Connection) -> list[str]:
    """The names of the newest runs, as people write them."""
    configs = connection.execute(select(runs.c.config).order_by(runs.c.created_at.desc()).limit(_NEWEST)).scalars()
    return [name for config in configs if (name := msgspec.json.decode(config).get("name"))]


def _run_by_name(connection: Connection, name: str) -> str | None:
    said = f'"name":{msgspec.json.encode(name).decode()}'
    query = select(runs.c.id, runs.c.config).where(runs.c.config.contains(said, autoescape=True))
    for found_id, config in connection.execute(query.order_by(runs.c.created_at.desc(), runs.c.id.desc())):
        if msgspec.json.decode(config).get("name") == name:
            return found_id
    return None


def delete_rollouts(connection: Connection, run_id: str, *, limit: int) -> int:
    """Remove some of a run's rollouts with all that is theirs; gives how many."""
    some = list(connection.execute(select(rollouts.c.id).where(rollouts.c.run_id == run_id).limit(limit)).scalars())
    for table in _OF_ROLLOUTS:
        connection.execute(delete(table).where(table.c.rollout_id.in_(some)))
    connection.execute(delete(rollouts).where(rollouts.c.id.in_(some)))
    return len(some)


def delete_run(connection: Connection, run_id: str) -> int:
    """Remove a run with the rollouts that it still has; gives how many those were."""
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise StoreError(f"no run {run_id}", hint="rollyard list shows those there are")
    lost = select(sessions.c.rollout_id).join(attempts, attempts.c.id == sessions.c.attempt_id)  # of workers that died
    own = select(rollouts.c.id).where(rollouts.c.run_id == run_id).union(lost.where(attempts.c.run_id == run_id))
    for table in _OF_ROLLOUTS:
        connection.execute(delete(table).where(table.c.rollout_id.in_(own)))
    connection.execute(delete(events).where(events.c.run_id == run_id))
    count = connection.execute(delete(rollouts).where(rollouts.c.run_id == run_id)).rowcount
    for table in (attempts, pauses):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    connection.execute(delete(runs).where(runs.c.id == run_id))
    return count
