"""The little query language that verifiers use: `db.table("users").eq("name", "Ada").first()`.

A query is a value: each method gives another one, and only `all`, `first`, `count` and the assertions ask the database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Run = Callable[[str, Sequence[Any]], "tuple[list[str], list[list[Any]]]"]


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def reference(name: str) -> str:
    """A column as it is written in a query: quoted where it is a plain name, as given where it is an expression."""
    return quote_name(name) if name.isidentifier() else name


class Count(int):
    """A number of rows that can be asserted about."""

    @property
    def value(self) -> int:
        return int(self)

    def assert_eq(self, expected: int) -> Count:
        return self._must(self == expected, f"{expected}")

    def assert_gt(self, threshold: int) -> Count:
        return self._must(self > threshold, f"more than {threshold}")

    def assert_between(self, low: int, high: int) -> Count:
        return self._must(low <= self <= high, f"between {low} and {high}")

    def _must(self, holds: bool, wanted: str) -> Count:
        if not holds:
            raise AssertionError(f"Expected a count of {wanted}, got {int(self)}")
        return self


class QueryBuilder:
    def __init__(self, run: Run, table: str, **parts: Any) -> None:
        self._run, self._table = run, table
        self._columns: tuple[str, ...] = parts.get("columns", ("*",))
        self._conditions: tuple[tuple[str, str, Any], ...] = parts.get("conditions", ())
        self._joins: tuple[tuple[str, Mapping[str, str]], ...] = parts.get("joins", ())
        self._order: str | None = parts.get("order")
        self._limit: int | None = parts.get("limit")

    def _with(self, **changes: Any) -> QueryBuilder:
        parts = {
            "columns": self._columns,
            "conditions": self._conditions,
            "joins": self._joins,
            "order": self._order,
            "limit": self._limit,
        }
        return QueryBuilder(self._run, self._table, **{**parts, **changes})

    def _where(self, column: str, operator: str, value: Any) -> QueryBuilder:
        return self._with(conditions=(*self._conditions, (column, operator, value)))

    def select(self, *columns: str) -> QueryBuilder:
        return self._with(columns=columns or ("*",))

    def limit(self, n: int | None) -> QueryBuilder:
        return self._with(limit=n)

    def sort(self, column: str, desc: bool = False) -> QueryBuilder:
        return self._with(order=f"{reference(column)} {'DESC' if desc else 'ASC'}")

    def eq(self, column: str, value: Any) -> QueryBuilder:
        return self.is_null(column) if value is None else self._where(column, "=", value)

    def neq(self, column: str, value: Any) -> QueryBuilder:
        return self.not_null(column) if value is None else self._where(column, "!=", value)

    def gt(self, column: str, value: Any) -> QueryBuilder:
        return self._where(column, ">", value)

    def gte(self, column: str, value: Any) -> QueryBuilder:
        return self._where(column, ">=", value)

    def lt(self, column: str, value: Any) -> QueryBuilder:
        return self._where(column, "<", value)

    def lte(self, column: str, value: Any) -> QueryBuilder:
        return self._where(column, "<=", value)

    def in_(self, column: str, values: Sequence[Any]) -> QueryBuilder:
        return self._where(column, "IN", tuple(values))

    def not_in(self, column: str, values: Sequence[Any]) -> QueryBuilder:
        return self._where(column, "NOT IN", tuple(values))

    def is_null(self, column: str) -> QueryBuilder:
        return self._where(column, "IS NULL", None)

    def not_null(self, column: str) -> QueryBuilder:
        return self._where(column, "IS NOT NULL", None)

    def ilike(self, column: str, pattern: str) -> QueryBuilder:
        return self._where(column, "LIKE", pattern)

    def where(self, conditions: Mapping[str, Any] | None = None, **more: Any) -> QueryBuilder:
        made = self
        for column, value in {**(conditions or {}), **more}.items():
            made = made.eq(column, value)
        return made

    def join(self, other_table: str, on: Mapping[str, str]) -> QueryBuilder:
        """`on` is {column here: column there}."""
        return self._with(joins=(*self._joins, (other_table, dict(on))))

    def compile(self, columns: Sequence[str] | None = None, *, counting: bool = False) -> tuple[str, list[Any]]:
        names = columns or [name if name == "*" else reference(name) for name in self._columns]
        sql, values = f"SELECT {', '.join(names)} FROM {quote_name(self._table)}", []
        for table, on in self._joins:
            pairs = [
                f"{quote_name(self._table)}.{quote_name(a)} = {quote_name(table)}.{quote_name(b)}"
                for a, b in on.items()
            ]
            sql += f" JOIN {quote_name(table)} ON {' AND '.join(pairs)}"
        clauses: list[str] = []
        for column, operator, value in self._conditions:
            if operator in ("IN", "NOT IN"):
                clauses.append(f"{reference(column)} {operator} ({', '.join('?' * len(value))})")
                values += value
            elif operator in ("IS NULL", "IS NOT NULL"):
                clauses.append(f"{reference(column)} {operator}")
            else:
                clauses.append(f"{reference(column)} {operator} ?")
                values.append(value)
        if clauses:
            sql += f" WHERE {' AND '.join(clauses)}"
        if self._order and not counting:
            sql += f" ORDER BY {self._order}"
        if self._limit is not None and not counting:
            sql += f" LIMIT {int(self._limit)}"
        return sql, values

    def all(self) -> list[Row]:
        columns, rows = self._run(*self.compile())
        return [dict(zip(columns, row)) for row in rows]

    def first(self) -> Row | None:
        found = self.limit(1).all()
        return found[0] if found else None

    def count(self) -> Count:
        _, rows = self._run(*self.compile(["COUNT(*)"], counting=True))
        return Count(rows[0][0])

    def explain(self) -> str:
        sql, values = self.compile()
        return f"{sql} with {values}"

    def assert_exists(self) -> QueryBuilder:
        if self.first() is None:
            raise AssertionError(f"Expected at least one matching row, found none: {self.explain()}")
        return self

    def assert_none(self) -> QueryBuilder:
        found = self.first()
        if found is not None:
            raise AssertionError(f"Expected no matching row, found {found}: {self.explain()}")
        return self

    def assert_eq(self, column: str, value: Any) -> QueryBuilder:
        found = self.first()
        if found is None:
            raise AssertionError(f"Expected a row with {column}={value!r}, found none: {self.explain()}")
        if found.get(column) != value:
            raise AssertionError(f"Expected {column}={value!r}, got {found.get(column)!r}: {self.explain()}")
        return self
