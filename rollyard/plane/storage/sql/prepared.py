"""A statement that runs for every creation: built once, and on SQLite given to the driver as text.

There the expression language costs several times as much as the statement itself. Values are named as the statement's
`bindparam`s are; rows come back as dicts in the database's own types, so a flag is 0 or 1 on SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Update
from sqlalchemy.dialects import sqlite


class PreparedStatement:
    def __init__(self, statement: Update) -> None:
        self._statement = statement
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text = str(compiled)
        self._constants = {name: value for name, value in compiled.params.items() if value is not None}

    def count(self, connection: Connection, values: Mapping[str, Any]) -> int:
        """How many rows it changed."""
        if connection.dialect.name == "sqlite":
            return _driver(connection).execute(self._text, {**self._constants, **values}).rowcount
        return connection.execute(self._statement, values).rowcount

    def first(self, connection: Connection, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The row that it returns."""
        if connection.dialect.name != "sqlite":
            row = connection.execute(self._statement, values).mappings().first()
            return None if row is None else dict(row)
        cursor = _driver(connection).execute(self._text, {**self._constants, **values})
        rows = cursor.fetchall()
        return dict(zip((column[0] for column in cursor.description), rows[0], strict=True)) if rows else None


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection
