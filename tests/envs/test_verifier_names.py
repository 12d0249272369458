"""The names that verifier code counts on mean what they mean in Fleet's own SDK, wherever that keeps to its own description."""

from __future__ import annotations

import copy
import sqlite3

import pytest

from rollyard.inside.verifier import names, snapshots

theirs = pytest.importorskip("fleet.verifiers.db", reason="the extra `fleet` (fleet-python) is not installed")

ROWS = [(1, "ada", 36, '{"a": 1, "b": 2}', "t0"), (2, "bob", None, None, "t0"), (3, "cyd", 5, "[]", "t0")]
INSERTED, DELETED = "INSERT INTO users VALUES (4, 'dee', 1, NULL, 't1')", "DELETE FROM users WHERE id = 3"
WORLDS = {
    "same": [],
    "one field": ["UPDATE users SET name = 'bill' WHERE id = 2"],
    "two fields": ["UPDATE users SET name = 'bill', age = 7 WHERE id = 2"],
    "json": ['UPDATE users SET meta = \'{"b": 2, "a": 1}\' WHERE id = 1'],
    "to null": ["UPDATE users SET age = NULL WHERE id = 1"],
    "insert": [INSERTED],
    "delete": [DELETED],
    "both": [INSERTED, DELETED],
    "two keys": ["UPDATE links SET w = 'z' WHERE a = 1 AND b = 2"],
    "time": ["UPDATE users SET at = 't9' WHERE id = 1"],
}
ONE_BY_ONE = {
    "none": [],
    "name": [{"table": "users", "pk": 2, "field": "name", "after": "bill"}],
    "text key": [{"table": "users", "pk": "2", "field": "name", "after": "bill"}],
    "wrong": [{"table": "users", "pk": 2, "field": "name", "after": "x"}],
    "age": [
        {"table": "users", "pk": 2, "field": "name", "after": "bill"},
        {"table": "users", "pk": 2, "field": "age", "after": 7},
    ],
    "null": [{"table": "users", "pk": 1, "field": "age", "after": None}],
    "json": [{"table": "users", "pk": 1, "field": "meta", "after": '{"a":1,"b":2}'}],
    "added": [{"table": "users", "pk": 4, "field": None, "after": "__added__"}],
    "removed": [{"table": "users", "pk": 3, "field": None, "after": "__removed__"}],
    "links": [{"table": "links", "pk": [1, 2], "field": "w", "after": "z"}],
}
WHOLE = [("id", 4), ("name", "dee"), ("age", 1), ("meta", None), ("at", ...)]
ROW_BY_ROW = {
    "none": [],
    "insert": [{"table": "users", "pk": 4, "type": "insert", "fields": WHOLE}],
    "insert, part": [{"table": "users", "pk": 4, "type": "insert", "fields": WHOLE[:2]}],
    "insert, wrong": [{"table": "users", "pk": 4, "type": "insert", "fields": [("name", "x"), *WHOLE[2:], ("id", 4)]}],
    "insert, any": [{"table": "users", "pk": 4, "type": "insert"}],
    "modify": [
        _ := {
            "table": "users",
            "pk": 2,
            "type": "modify",
            "resulting_fields": [("name", "bill")],
            "no_other_changes": True,
        }
    ],
    "modify, loose": [{**_, "no_other_changes": False}],
    "modify, any": [{**_, "resulting_fields": [("name", ...)]}],
    "modify, wrong": [{**_, "resulting_fields": [("name", "x")]}],
    "modify, two": [{**_, "resulting_fields": [("name", "bill"), ("age", 7)]}],
    "null": [{**_, "pk": 1, "resulting_fields": [("age", None)]}],
    "delete": [{"table": "users", "pk": 3, "type": "delete"}],
    "delete, part": [{"table": "users", "pk": 3, "type": "delete", "fields": [("name", "cyd")]}],
    "delete, wrong": [{"table": "users", "pk": 3, "type": "delete", "fields": [("name", "x")]}],
    "both": [
        {"table": "users", "pk": 4, "type": "insert", "fields": WHOLE},
        {"table": "users", "pk": 3, "type": "delete"},
    ],
    "links": [
        {"table": "links", "pk": (1, 2), "type": "modify", "resulting_fields": [("w", "z")], "no_other_changes": True}
    ],
}
IGNORING = {
    "nothing": {},
    "a field": {"fields": {"at"}},
    "a table": {"tables": {"users"}},
    "two": {"table_fields": {"users": {"at", "meta"}}},
}


class WholeDiff(theirs.SnapshotDiff):
    """Theirs, comparing whole databases: its shortcut looks only at the rows that are named, and misses changes elsewhere."""

    def _can_use_targeted_queries(self, allowed_changes):
        return False


def made(path, changes=()):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, meta TEXT, at TEXT)")
        database.executemany("INSERT INTO users VALUES (?, ?, ?, ?, ?)", ROWS)
        database.execute("CREATE TABLE links (a INTEGER, b INTEGER, w TEXT, PRIMARY KEY (a, b))")
        database.executemany("INSERT INTO links VALUES (?, ?, ?)", [(1, 2, "x"), (2, 3, "y")])
        for change in changes:
            database.execute(change)
    database.close()
    return str(path)


def outcome(diff, method, specs):
    try:
        getattr(diff, method)(copy.deepcopy(specs))
    except AssertionError:
        return "refused"
    except ValueError:
        return "invalid"
    return "fine"


def described_otherwise(world, method, specs, ignoring):
    """Where their SDK does not do what its description says, and ours does: a resulting field that did not change is looked at
    all the same; the fields of a delete need not be complete; what is ignored is ignored, and never counts as expected."""
    if world == "one field" and specs == "modify, two":
        return True
    if world == "delete" and specs == "delete, part" and method == "expect_only_v2":
        return True
    only_ignored = (world == "time" and ignoring in ("a field", "two")) or (world == "json" and ignoring == "two")
    return only_ignored and (specs == "none" or method == "expect_exactly")


@pytest.mark.parametrize("ignoring", IGNORING)
def test_differences_are_judged_as_their_sdk_describes_it(ignoring, tmp_path):
    """E6, E13"""
    seed = made(tmp_path / "seed.db")
    tried = 0
    for world, changes in WORLDS.items():
        current = made(tmp_path / f"{world}.db", changes)
        for method, table in (
            ("expect_only", ONE_BY_ONE),
            ("expect_only_v2", ROW_BY_ROW),
            ("expect_exactly", ROW_BY_ROW),
        ):
            for name, specs in table.items():
                before, after = theirs.DatabaseSnapshot(seed), theirs.DatabaseSnapshot(current)
                their = outcome(WholeDiff(before, after, theirs.IgnoreConfig(**IGNORING[ignoring])), method, specs)
                ignore = snapshots.IgnoreConfig(**IGNORING[ignoring])
                our = outcome(
                    snapshots.DatabaseSnapshot(seed).diff(snapshots.DatabaseSnapshot(current), ignore), method, specs
                )
                tried += 1
                if not described_otherwise(world, method, name, ignoring):
                    assert our == their, (world, method, name)
    assert tried > 400


def test_text_and_number_helpers_agree():
    """E6"""
    from fleet.verifiers import local_executor as executor

    texts = [
        "",
        "Hello, World!",
        "helloworld",
        "1,200.50 and -3",
        "5.",
        "v1.2.3",
        "a-b_c",
        {"b": [1], "a": "x"},
        ["x", 2],
        7,
    ]
    for one in texts:
        for other in texts:
            if isinstance(one, str):
                assert names.normalized_contains(one, other) == executor.normalized_contains(one, other), (one, other)
                same = executor.normalized_string_comparison(one, other)
                assert names.normalized_string_comparison(one, other) == same
        if isinstance(one, str):
            assert names.extract_numbers(one) == executor.extract_numbers(one)
            for number in (1200.5, "1,200.50", "-3", 5, "x", ""):
                assert names.contains_number(one, number) == executor.contains_number(one, number), (one, number)


def test_queries_give_the_same_rows(tmp_path):
    """E6"""
    path = made(tmp_path / "a.db")
    questions = [
        lambda db: db.table("users").all(),
        lambda db: db.table("users").eq("name", "ada").first(),
        lambda db: db.table("users").select("id", "name").gt("id", 1).sort("id", desc=True).all(),
        lambda db: db.table("users").in_("id", [1, 3]).neq("name", "ada").all(),
        lambda db: db.table("users").not_in("id", [1]).lte("id", 2).all(),
        lambda db: db.table("users").is_null("age").all(),
        lambda db: db.table("users").not_null("age").limit(1).all(),
        lambda db: db.table("users").ilike("name", "%D%").all(),
        lambda db: db.table("links").join("users", {"a": "id"}).select("w", "name").all(),
        lambda db: db.table("users").gte("age", 6).count().value,
        lambda db: sorted(db.tables()),
    ]
    for number, ask in enumerate(questions):
        assert ask(snapshots.DatabaseSnapshot(path)) == ask(theirs.DatabaseSnapshot(path)), number
