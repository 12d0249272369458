"""Whose a snapshot or a bundle is. Both are reached by a name that others may come to know, so the name alone opens nothing."""

from __future__ import annotations

from sqlalchemy import Connection, select

from rollyard.core.plane import OwnedKind
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_owned as owned


def add_owner(connection: Connection, kind: OwnedKind, name: str, owner: str, *, at: float) -> None:
    insert_new(connection, owned, {"kind": kind, "name": name, "owner": owner, "created_at": at})


def owners_of(connection: Connection, kind: OwnedKind, name: str) -> set[str]:
    wanted = select(owned.c.owner).where(owned.c.kind == kind, owned.c.name == name)
    return set(connection.execute(wanted).scalars())
