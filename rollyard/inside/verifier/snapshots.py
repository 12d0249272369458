"""A database as a verifier sees it, and the difference of two: what was added, removed and changed, and whether that was allowed.

Expectations come in two forms, freely mixed: one change each (`{"table", "pk", "field", "after"}`, with `after` being `__added__`
or `__removed__` for whole rows) and one row each (`{"table", "pk", "type": "insert" | "modify" | "delete", "fields" |
"resulting_fields"}`). In a list of fields `("name", ...)` accepts any value.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from .query import QueryBuilder, Row, Run, quote_name

_SCHEMA = (
    'SELECT t.name, t.sql, c.name, c.type, c."notnull", c.dflt_value, c.pk '
    "FROM sqlite_master AS t, pragma_table_info(t.name) AS c "
    "WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' ORDER BY t.name, c.cid"
)
Spec = Mapping[str, Any]


class IgnoreConfig:
    """Tables, fields of all tables, and fields of one table that do not count."""

    def __init__(
        self,
        tables: Iterable[str] | None = None,
        fields: Iterable[str] | None = None,
        table_fields: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.tables, self.fields = set(tables or ()), set(fields or ())
        self.table_fields = {table: set(names) for table, names in (table_fields or {}).items()}

    def should_ignore_table(self, table: str) -> bool:
        return table in self.tables

    def should_ignore_field(self, table: str, field: str) -> bool:
        return field in self.fields or field in self.table_fields.get(table, ())


class DatabaseSnapshot:
    """`source` is a file, or a function that answers a query with columns and rows."""

    def __init__(self, source: str | Run, *, name: str | None = None) -> None:
        self.name = name or (source if isinstance(source, str) else "snapshot")
        self._run: Run = _file(source) if isinstance(source, str) else source

    def query(self, query: str, args: Sequence[Any] | None = None) -> SimpleNamespace:
        columns, rows = self._run(query, list(args or ()))
        return SimpleNamespace(success=True, columns=columns, rows=rows, error=None, message="")

    def exec(self, query: str, args: Sequence[Any] | None = None) -> SimpleNamespace:
        raise PermissionError("a verifier reads databases; it does not change them")

    def describe(self) -> SimpleNamespace:
        tables = list(self.schema().values())
        return SimpleNamespace(success=True, resource_name=self.name, tables=tables, error=None, message="")

    def schema(self) -> dict[str, SimpleNamespace]:
        """Every table with its sql, its columns and its primary key, in one question."""
        found: dict[str, SimpleNamespace] = {}
        for table, sql, name, kind, needed, default, pk in self._run(_SCHEMA, [])[1]:
            made = found.setdefault(table, SimpleNamespace(name=table, sql=sql, columns=[], primary_key=[]))
            column = {"name": name, "type": kind, "notnull": bool(needed), "default_value": default, "pk": pk}
            made.columns.append(column)
            if pk:
                keyed = [one for one in made.columns if one["pk"]]
                made.primary_key = [one["name"] for one in sorted(keyed, key=lambda one: one["pk"])]
        return found

    def tables(self) -> list[str]:
        return list(self.schema())

    def table(self, table: str) -> QueryBuilder:
        return QueryBuilder(self._run, table)

    def rows_by_key(self, table: str, key: Sequence[str]) -> dict[Any, Row]:
        """By primary key; by rowid where a table has none."""
        chosen = "*" if key else "rowid AS __rowid__, *"
        columns, rows = self._run(f"SELECT {chosen} FROM {quote_name(table)}", [])
        found: dict[Any, Row] = {}
        for values in rows:
            row = dict(zip(columns, values))
            if key:
                found[row[key[0]] if len(key) == 1 else tuple(row[name] for name in key)] = row
            else:
                found[row.pop("__rowid__")] = row
        return found

    def snapshot(self, name: str | None = None) -> DatabaseSnapshot:
        """A copy of its own, in memory, that later changes do not reach."""
        copied = sqlite3.connect(":memory:")
        for table, made in self.schema().items():
            copied.execute(made.sql)
            columns, rows = self._run(f"SELECT * FROM {quote_name(table)}", [])
            copied.executemany(f"INSERT INTO {quote_name(table)} VALUES ({', '.join('?' * len(columns))})", rows)
        return DatabaseSnapshot(_connection(copied), name=name or self.name)

    def diff(self, other: DatabaseSnapshot, ignore_config: IgnoreConfig | None = None, **_: Any) -> SnapshotDiff:
        return SnapshotDiff(self, other, ignore_config)

    def expect_row(self, table: str, where: Spec, expect: Spec) -> DatabaseSnapshot:
        found = self.table(table).where(where).assert_exists()
        for column, value in expect.items():
            found.assert_eq(column, value)
        return self

    def expect_rows(
        self, table: str, where: Spec, *, count: int | None = None, contains: Sequence[Spec] | None = None
    ) -> DatabaseSnapshot:
        wanted = self.table(table).where(where)
        if count is not None:
            wanted.count().assert_eq(count)
        rows = wanted.all() if contains else []
        for one in contains or ():
            if not any(all(row.get(name) == value for name, value in one.items()) for row in rows):
                raise AssertionError(f"Expected a row with {dict(one)} in {table}")
        return self

    def expect_absent_row(self, table: str, where: Spec) -> DatabaseSnapshot:
        self.table(table).where(where).assert_none()
        return self


class SnapshotDiff:
    """`changes` is {table: {primary_key, added_rows, removed_rows, modified_rows, unchanged_count, total_changes}}."""

    def __init__(
        self, before: DatabaseSnapshot, after: DatabaseSnapshot, ignore_config: IgnoreConfig | None = None
    ) -> None:
        self.before, self.after = before, after
        self.ignore_config = ignore_config or IgnoreConfig()
        self._changes: dict[str, Any] | None = None

    @property
    def changes(self) -> dict[str, Any]:
        if self._changes is None:
            before, after = self.before.schema(), self.after.schema()
            self._changes = {
                name: self._of(name, before.get(name), after.get(name))
                for name in sorted({**before, **after})
                if not self.ignore_config.should_ignore_table(name)
            }
        return self._changes

    def _of(self, table: str, before: SimpleNamespace | None, after: SimpleNamespace | None) -> dict[str, Any]:
        old = self.before.rows_by_key(table, before.primary_key) if before else {}
        new = self.after.rows_by_key(table, after.primary_key) if after else {}
        changed = {key: self._fields(table, old[key], new[key]) for key in new if key in old}
        added = [{"row_id": key, "data": row} for key, row in new.items() if key not in old]
        removed = [{"row_id": key, "data": row} for key, row in old.items() if key not in new]
        modified = [{"row_id": key, "changes": fields, "data": new[key]} for key, fields in changed.items() if fields]
        return {
            "table_name": table,
            "primary_key": (after or before or SimpleNamespace(primary_key=[])).primary_key,
            "added_rows": added,
            "removed_rows": removed,
            "modified_rows": modified,
            "unchanged_count": len(changed) - len(modified),
            "total_changes": len(added) + len(removed) + len(modified),
        }

    def _fields(self, table: str, old: Row, new: Row) -> dict[str, Any]:
        names = [name for name in {**old, **new} if not self.ignore_config.should_ignore_field(table, name)]
        return {
            name: {"before": old.get(name), "after": new.get(name)} for name in names if old.get(name) != new.get(name)
        }

    def expect_only(self, allowed_changes: Sequence[Spec]) -> SnapshotDiff:
        """Nothing but these changes; they need not all have happened."""
        unexpected, _ = self._match(allowed_changes)
        return self._must(not unexpected, "Unexpected database changes", unexpected, allowed_changes)

    def expect_only_v1(self, allowed_changes: Sequence[Spec]) -> SnapshotDiff:
        return self.expect_only(allowed_changes)

    def expect_only_v2(self, allowed_changes: Sequence[Spec]) -> SnapshotDiff:
        return self.expect_only(allowed_changes)

    def expect_exactly(self, expected_changes: Sequence[Spec]) -> SnapshotDiff:
        """These changes, all of them, and no other."""
        unexpected, used = self._match(expected_changes)
        self._must(not unexpected, "Unexpected database changes", unexpected, expected_changes)
        missing = [str(dict(spec)) for place, spec in enumerate(expected_changes) if place not in used]
        return self._must(not missing, "Expected database changes did not happen", missing, expected_changes)

    def expect(self, *, allow: Sequence[Spec] = (), forbid: Sequence[Spec] = ()) -> SnapshotDiff:
        """By table and field: nothing forbidden changed, and nothing but what is allowed where anything is."""
        allowed = {(spec["table"], spec.get("field")) for spec in allow}
        forbidden = {(spec["table"], spec.get("field")) for spec in forbid}
        for table, report in self.changes.items():
            places = {(table, field) for row in report["modified_rows"] for field in row["changes"]}
            if report["added_rows"] or report["removed_rows"]:
                places.add((table, None))
            for place in sorted(places, key=str):
                if place in forbidden:
                    raise AssertionError(f"Change of {place}, which is forbidden")
                if allowed and place not in allowed and place[1] is not None:
                    raise AssertionError(f"Change of {place}, which is not allowed")
        return self

    def _must(self, holds: bool, words: str, found: Sequence[str], specs: Sequence[Spec]) -> SnapshotDiff:
        if not holds:
            shown = [*found[:5], f"... and {len(found) - 5} more"] if len(found) > 5 else list(found)
            raise AssertionError("\n".join([f"{words}:", *shown, f"Allowed: {[dict(spec) for spec in specs[:5]]}"]))
        return self

    def _match(self, specs: Sequence[Spec]) -> tuple[list[str], set[int]]:
        """What no spec covers, and the places of the specs that were used."""
        unexpected: list[str] = []
        used: set[int] = set()
        for table, report in self.changes.items():
            near = [(place, spec) for place, spec in enumerate(specs) if spec["table"] == table]
            for kind, rows in (("insert", "added_rows"), ("delete", "removed_rows")):
                for row in report[rows]:
                    found = [place for place, spec in near if _covers_row(spec, kind, row, self._list_ignored(table))]
                    used.update(found)
                    if not found:
                        unexpected.append(f"{kind} in {table}, row {row['row_id']!r}: {row['data']}")
            for row in report["modified_rows"]:
                for field, values in row["changes"].items():
                    found = [place for place, spec in near if _covers_field(spec, row, field, values["after"])]
                    used.update(found)
                    if not found:
                        unexpected.append(
                            f"modify in {table}, row {row['row_id']!r}: {field} became {values['after']!r}"
                        )
        return unexpected, used

    def _list_ignored(self, table: str) -> set[str]:
        return self.ignore_config.fields | self.ignore_config.table_fields.get(table, set())


def same(one: Any, other: Any) -> bool:
    """Equal, or equal as JSON where both are texts that hold some."""
    if one == other:
        return True
    if isinstance(one, str) and isinstance(other, str) and one[:1] in "{[" and other[:1] in "{[":
        try:
            return json.loads(one) == json.loads(other)
        except ValueError:
            return False
    return False


def _is_row(spec: Spec, row_id: Any) -> bool:
    wanted = tuple(spec["pk"]) if isinstance(spec.get("pk"), list) else spec.get("pk")
    return wanted is not None and str(wanted) == str(row_id)


def _pairs(fields: Iterable[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for one in fields:
        if not isinstance(one, (tuple, list)) or len(one) != 2:
            raise ValueError(f"a field is given as (name, value), or as (name, ...) for any value; got {one!r}")
        made[one[0]] = one[1]
    return made


def _holds(wanted: Mapping[str, Any], row: Row) -> bool:
    return all(name in row and (value is ... or same(value, row[name])) for name, value in wanted.items())


def _covers_row(spec: Spec, kind: str, row: Mapping[str, Any], ignored: set[str]) -> bool:
    if not _is_row(spec, row["row_id"]):
        return False
    if "type" not in spec:
        return spec.get("field") is None and spec.get("after") == ("__added__" if kind == "insert" else "__removed__")
    if spec["type"] != kind:
        return False
    if spec.get("fields") is None:
        return True
    wanted = _pairs(spec["fields"])
    complete = kind == "delete" or all(name in wanted or name in ignored for name in row["data"])
    return complete and _holds(wanted, row["data"])


def _covers_field(spec: Spec, row: Mapping[str, Any], field: str, after: Any) -> bool:
    if not _is_row(spec, row["row_id"]):
        return False
    if "type" not in spec:
        return spec.get("field") == field and same(spec.get("after"), after)
    if spec["type"] != "modify":
        return False
    if not isinstance(spec.get("no_other_changes"), bool):
        raise ValueError("a modify needs no_other_changes, True or False")
    wanted = _pairs(spec.get("resulting_fields") or ())
    if not _holds(wanted, row["data"]):
        return False
    return field in wanted or not spec["no_other_changes"]


def _file(path: str) -> Run:
    return _connection(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True))


def _connection(made: sqlite3.Connection) -> Run:
    def run(sql: str, args: Sequence[Any]) -> tuple[list[str], list[list[Any]]]:
        found = made.execute(sql, args)
        return [column[0] for column in found.description or ()], [list(row) for row in found.fetchall()]

    return run
