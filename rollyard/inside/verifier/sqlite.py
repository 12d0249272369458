"""Requests about SQLite files: a line of JSON on stdin each, a line of JSON on stdout for it, until stdin ends.

Reading is the default and is enforced three times: the file is opened read-only, `query_only` is set, and nothing may be
attached. Rows and time are capped. A file that an agent wrote may be hostile: that is why this runs in the agent's own sandbox.
"""

from __future__ import annotations

import base64
import json
import math
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import snapshots

Answer = dict[str, Any]


def plain(value: Any) -> Any:
    """As JSON has it: bytes in base64, and an infinity as a word."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def open_database(path: str, *, read_only: bool, seconds: float) -> sqlite3.Connection:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no database at {path}")
    mode = "ro" if read_only else "rw"
    made = sqlite3.connect(f"file:{quote(path)}?mode={mode}", uri=True, isolation_level=None, timeout=seconds)
    if read_only:
        made.execute("PRAGMA query_only = ON")
    refused = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)

    def may(action: int, *_: Any) -> int:
        return sqlite3.SQLITE_DENY if action in refused else sqlite3.SQLITE_OK

    made.set_authorizer(may)
    end = time.monotonic() + seconds
    made.set_progress_handler(lambda: int(time.monotonic() > end), 10_000)
    return made


def describe(request: Answer) -> Answer:
    with closing(open_database(request["path"], read_only=True, seconds=request["seconds"])) as made:
        return {"tables": _tables(made)}


def _tables(made: sqlite3.Connection) -> list[Answer]:
    tables: list[Answer] = []
    listed = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    for name, sql in made.execute(listed).fetchall():
        columns = [
            {"name": row[1], "type": row[2], "notnull": bool(row[3]), "default_value": plain(row[4]), "pk": row[5]}
            for row in made.execute(f"PRAGMA table_info({snapshots.quote_name(name)})")
        ]
        tables.append({"name": name, "sql": sql or "", "columns": columns})
    return tables


def query(request: Answer) -> Answer:
    with closing(open_database(request["path"], read_only=request["read_only"], seconds=request["seconds"])) as made:
        return _rows(made.execute(request["sql"], request.get("args") or []), request)


def _rows(found: sqlite3.Cursor, request: Answer) -> Answer:
    if found.description is None:
        return {"columns": [], "rows": [], "rows_affected": found.rowcount, "last_insert_id": found.lastrowid}
    most = request["max_rows"]
    rows = [[plain(value) for value in row] for row in found.fetchmany(most + 1)]
    answer: Answer = {"columns": [column[0] for column in found.description], "rows": rows[:most]}
    answer["truncated"] = len(rows) > most
    if not request["read_only"]:
        answer.update(rows_affected=max(0, found.rowcount), last_insert_id=found.lastrowid)
    return answer


def copy(request: Answer) -> Answer:
    """A consistent copy, whatever writes meanwhile; the target is replaced."""
    source = open_database(request["path"], read_only=True, seconds=request["seconds"])
    target = sqlite3.connect(request["target"], timeout=request["seconds"])
    with target:
        source.backup(target)
    target.close()
    source.close()
    return {"target": request["target"]}


def diff(request: Answer) -> Answer:
    before, after = snapshots.DatabaseSnapshot(request["path"]), snapshots.DatabaseSnapshot(request["other"])
    return {"diff": before.diff(after).changes}


_KNOWN = {"describe": describe, "query": query, "copy": copy, "diff": diff}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = json.dumps({"ok": True, **_KNOWN[request["op"]](request)}, default=plain, allow_nan=False)
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, OverflowError) as error:
            answer = json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
