"""An insert that says whether the row was new, without failing the transaction when it was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """On PostgreSQL this waits for another transaction that is inserting the same key."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    key = next(iter(table.primary_key.columns))
    statement = insert(table).values(**row).on_conflict_do_nothing().returning(key)
    return connection.execute(statement).first() is not None
