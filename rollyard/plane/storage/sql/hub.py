"""Environment descriptions `name@version`. Every change is one conditional statement on the revision that the caller saw,
so that two replicas never overwrite each other; the record and what a search finds of it are one row."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, delete, select, tuple_, update

from rollyard.core.errors import PlaneConflict, PlaneNotFound
from rollyard.core.plane import EnvRecord, EnvSpec
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_envs as envs


def create(connection: Connection, record: EnvRecord) -> EnvRecord:
    row = {
        "name": record.name,
        "version": record.version,
        "owner": record.owner,
        "revision": record.revision,
        "status": record.status,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        **_spec(record.name, record.version, record.spec),
    }
    if not insert_new(connection, envs, row):
        raise PlaneConflict(f"{record.id} exists", hint="update it, or choose another version")
    return record


def get(connection: Connection, name: str, version: str) -> EnvRecord:
    row = connection.execute(select(envs).where(*_is(name, version))).mappings().first()
    if row is None:
        raise PlaneNotFound(f"there is no environment {name}@{version}")
    return _record(row)


def replace(
    connection: Connection, name: str, version: str, spec: EnvSpec, *, revision: int | None, at: float
) -> EnvRecord:
    """`revision` None is for callers that say they overwrite whatever is there."""
    changes = {"revision": envs.c.revision + 1, "updated_at": at, **_spec(name, version, spec)}
    return _change(connection, name, version, revision, changes)


def release(connection: Connection, name: str, version: str, *, revision: int | None, at: float) -> EnvRecord:
    changes = {"revision": envs.c.revision + 1, "updated_at": at, "released_at": at, "status": "released"}
    return _change(connection, name, version, revision, changes)


def remove(connection: Connection, name: str, version: str, *, released: bool) -> None:
    """A released one goes only when `released` says so."""
    wanted = _is(name, version) if released else (*_is(name, version), envs.c.status == "draft")
    if not connection.execute(delete(envs).where(*wanted)).rowcount:
        get(connection, name, version)
        raise PlaneConflict(f"{name}@{version} is released", hint="only an admin may delete a released version")


def list_envs(
    connection: Connection, *, words: tuple[str, ...], status: str | None, after: tuple[str, str] | None, limit: int
) -> list[EnvRecord]:
    """By name and version, from past `after`; every word is somewhere in the name, version, description or tags."""
    query = select(envs).order_by(envs.c.name, envs.c.version).limit(limit)
    for word in words:
        query = query.where(envs.c.words.contains(word.lower(), autoescape=True))
    if status is not None:
        query = query.where(envs.c.status == status)
    if after is not None:
        query = query.where(tuple_(envs.c.name, envs.c.version) > tuple_(*after))
    return [_record(row) for row in connection.execute(query).mappings()]


def _change(
    connection: Connection, name: str, version: str, revision: int | None, changes: dict[str, Any]
) -> EnvRecord:
    wanted = [*_is(name, version), envs.c.status == "draft"]
    if revision is not None:
        wanted.append(envs.c.revision == revision)
    row = connection.execute(update(envs).where(*wanted).values(**changes).returning(envs)).mappings().first()
    if row is not None:
        return _record(row)
    found = get(connection, name, version)
    if found.status == "released":
        raise PlaneConflict(f"{found.id} is released and does not change", hint="create a new version")
    raise PlaneConflict(
        f"{found.id} is at revision {found.revision}, not {revision}", hint="read it again, then update"
    )


def _is(name: str, version: str) -> tuple[Any, Any]:
    return envs.c.name == name, envs.c.version == version


def _spec(name: str, version: str, spec: EnvSpec) -> dict[str, str]:
    words = " ".join((f"{name}@{version}", spec.description, *spec.tags)).lower()
    return {"spec": msgspec.json.encode(spec).decode(), "words": words}


def _record(row: Any) -> EnvRecord:
    return EnvRecord(
        name=row["name"],
        version=row["version"],
        owner=row["owner"],
        revision=row["revision"],
        status=row["status"],
        spec=msgspec.json.decode(row["spec"], type=EnvSpec),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        released_at=row["released_at"],
    )
