"""API keys, found by the sha256 of what was shown."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, update

from rollyard.core.errors import PlaneConflict, PlaneNotFound
from rollyard.core.plane import ApiKey
from rollyard.plane.storage.sql.insert import insert_new
from rollyard.store.schema import plane_keys as keys

_COLUMNS = ("id", "digest", "role", "owner", "instance_id", "created_at", "revoked_at")


def put(connection: Connection, key: ApiKey) -> ApiKey:
    if not insert_new(connection, keys, {name: getattr(key, name) for name in _COLUMNS}):
        raise PlaneConflict("this key exists")
    return key


def find(connection: Connection, digest: bytes) -> ApiKey | None:
    """None for one that is unknown or revoked."""
    wanted = (keys.c.digest == digest, keys.c.revoked_at.is_(None))
    row = connection.execute(select(keys).where(*wanted)).mappings().first()
    return None if row is None else _key(row)


def list_keys(connection: Connection) -> list[ApiKey]:
    return [_key(row) for row in connection.execute(select(keys).order_by(keys.c.id)).mappings()]


def revoke(connection: Connection, key_id: str, *, at: float) -> None:
    known = (keys.c.id == key_id, keys.c.revoked_at.is_(None))
    if not connection.execute(update(keys).where(*known).values(revoked_at=at)).rowcount:
        raise PlaneNotFound(f"there is no key {key_id}")


def _key(row: Any) -> ApiKey:
    return ApiKey(**{name: row[name] for name in _COLUMNS})
