"""What people say about rollouts: notes in words, labels, and scores of their own beside the verifier's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from rollyard.core.errors import ConfigError, StoreError
from rollyard.store.schema import notes, rollouts
from rollyard.store.values import Note, NoteKind

_LONGEST = 20_000


def add(
    connection: Connection,
    at: float,
    rollout_id: str,
    kind: NoteKind,
    *,
    author: str,
    name: str = "",
    text: str = "",
    score: float | None = None,
) -> Note:
    """Keep one. A label or score of the same name by the same author stands for the earlier one."""
    _check(kind, name, text, score)
    if connection.execute(select(rollouts.c.id).where(rollouts.c.id == rollout_id)).first() is None:
        raise StoreError(f"no rollout {rollout_id}", hint="rollyard list RUN shows those of a run")
    values: dict[str, Any] = {"rollout_id": rollout_id, "author": author, "kind": kind, "name": name}
    if kind != "note":
        same = [notes.c[column] == value for column, value in values.items()]
        connection.execute(delete(notes).where(*same))
    values |= {"at": at, "text": text, "score": score}
    made = connection.execute(insert(notes).values(**values).returning(notes.c.id)).scalar_one()
    return Note(id=made, **values)


def _check(kind: NoteKind, name: str, text: str, score: float | None) -> None:
    if kind == "note" and not text.strip():
        raise ConfigError("an empty note says nothing")
    if kind != "note" and (not name.strip() or not name.isprintable()):
        raise ConfigError(f"a {kind} needs a name, got {name!r}")
    if kind == "score" and (score is None or not math.isfinite(score)):
        raise ConfigError(f"a score is a number, got {score}")
    if len(text) > _LONGEST or len(name) > 200:
        raise ConfigError(f"a note has at most {_LONGEST} characters, a name 200")


def remove(connection: Connection, rollout_id: str, note_id: int) -> bool:
    """Whether there was one."""
    mine = (notes.c.rollout_id == rollout_id) & (notes.c.id == note_id)
    return connection.execute(delete(notes).where(mine)).rowcount > 0


def find_labelled(connection: Connection, run_id: str, name: str) -> frozenset[str]:
    """The rollouts of a run that have this label."""
    query = select(notes.c.rollout_id).join(rollouts, rollouts.c.id == notes.c.rollout_id)
    mine = (rollouts.c.run_id == run_id) & (notes.c.kind == "label") & (notes.c.name == name)
    return frozenset(connection.execute(query.where(mine)).scalars())


def find_noted(connection: Connection, run_id: str) -> frozenset[str]:
    """The rollouts of a run that have notes."""
    query = select(notes.c.rollout_id).join(rollouts, rollouts.c.id == notes.c.rollout_id)
    return frozenset(connection.execute(query.where(rollouts.c.run_id == run_id)).scalars())


def of_rollouts(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, list[Note]]:
    """Notes by rollout, the oldest first; a rollout without notes is left out."""
    found: dict[str, list[Note]] = defaultdict(list)
    query = select(notes).where(notes.c.rollout_id.in_(rollout_ids)).order_by(notes.c.id)
    for row in connection.execute(query).mappings():
        found[row["rollout_id"]].append(Note(**row))
    return dict(found)
