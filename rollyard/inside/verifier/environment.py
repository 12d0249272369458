"""`env` as a verifier gets it: the instance's databases, asked for one question at a time over this program's own pipes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any, TextIO

from .query import Count, QueryBuilder, Run
from .snapshots import DatabaseSnapshot, SnapshotDiff

_OURS = (DatabaseSnapshot, QueryBuilder, SnapshotDiff)
_AT_ONCE = {
    "db", "table", "select", "limit", "sort", "join", "where", "eq", "neq", "gt", "gte", "lt", "lte", "in_", "not_in",
    "is_null", "not_null", "ilike", "explain",
}  # fmt: skip


class LineChannel:
    """Questions out, answers in: one line each."""

    def __init__(self, out: TextIO, answers: TextIO) -> None:
        self._out, self._answers = out, answers

    def tell(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message, allow_nan=False) + "\n")
        self._out.flush()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(message)
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the instance cannot be asked any more")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise RuntimeError(answer["error"])
        return answer


class VerifierEnvironment:
    """`databases` are the names that the instance has; None where it was not asked."""

    def __init__(self, wire: LineChannel, about: dict[str, Any]) -> None:
        self._wire = wire
        self._databases: list[str] | None = about.get("databases")
        self.env_key, self.instance_id = about.get("env_key"), about.get("instance_id")

    @property
    def instance(self) -> VerifierEnvironment:
        return self

    def load(self) -> None:
        """Everything is there already."""

    def resources(self) -> list[str]:
        return list(self._databases or ())

    def db(self, name: str = "current") -> DatabaseSnapshot:
        if self._databases is not None and name not in self._databases:
            raise KeyError(f"there is no database {name!r}; known: {', '.join(self._databases) or 'none'}")
        return DatabaseSnapshot(self._runner(name), name=name)

    def _runner(self, name: str) -> Run:
        def run(sql: str, args: Sequence[Any]) -> tuple[list[str], list[list[Any]]]:
            answer = self._wire.ask({"query": sql, "args": list(args), "database": name})
            return answer["columns"], answer["rows"]

        return run


class Awaited:
    """The same for verifiers that are coroutines: what asks the database is awaited, what builds a question is not."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        if isinstance(found, VerifierEnvironment):
            return Awaited(found)
        if not inspect.ismethod(found):
            return found

        def now(*args: Any, **fields: Any) -> Any:
            given = [arg.value if isinstance(arg, Awaited) else arg for arg in args]
            got = found(*given, **fields)
            return Awaited(got) if isinstance(got, _OURS) and not isinstance(got, Count) else got

        async def later(*args: Any, **fields: Any) -> Any:
            return now(*args, **fields)

        return now if name in _AT_ONCE else later
