"""Databases of an instance: describe, query, snapshot, difference. `Databases` is the face, `SandboxDatabases` a sandbox's files.

Reading is the default; rows and seconds are capped. The files are opened where they are, in the sandbox, by a program that is
put there: a file that an agent may have written is never opened by the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollyard.core.errors import EnvError
from rollyard.core.protocols import Sandbox
from rollyard.envs.inside import archive

MAX_ROWS = 10_000
SECONDS = 10.0
_MARGIN_S = 20.0


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """`truncated`: there are more than were asked for. The last two are set where something was written."""

    columns: list[str] = []
    rows: list[list[Any]] = []
    truncated: bool = False
    rows_affected: int | None = None
    last_insert_id: int | None = None


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """`columns` have name, type, notnull, default_value and pk."""

    name: str
    sql: str
    columns: list[dict[str, Any]]


class Databases(Protocol):
    async def names(self) -> Sequence[str]: ...
    async def describe(self, name: str) -> list[Table]: ...
    async def query(
        self, name: str, sql: str, args: Sequence[Any] = (), *, read_only: bool = True, max_rows: int = MAX_ROWS
    ) -> Rows: ...


class SandboxDatabases:
    """`paths` are the SQLite files by the name that they are asked for."""

    def __init__(self, sandbox: Sandbox, paths: Mapping[str, str], *, seconds: float = SECONDS) -> None:
        self._sandbox, self.paths, self._seconds = sandbox, dict(paths), seconds
        self._program: str | None = None

    async def names(self) -> Sequence[str]:
        return tuple(self.paths)

    async def describe(self, name: str) -> list[Table]:
        return msgspec.convert((await self._asked("describe", name))["tables"], list[Table])

    async def query(
        self, name: str, sql: str, args: Sequence[Any] = (), *, read_only: bool = True, max_rows: int = MAX_ROWS
    ) -> Rows:
        answer = await self._asked("query", name, sql=sql, args=list(args), read_only=read_only, max_rows=max_rows)
        return msgspec.convert({key: value for key, value in answer.items() if key != "ok"}, Rows)

    async def snapshot(self, name: str, path: str) -> None:
        """A consistent copy of one at `path`, which is replaced."""
        await self._asked("copy", name, target=path)

    async def restore(self, name: str, source: str) -> None:
        """Make `name` what `source` is."""
        await self._asked("copy", source, target=self._path(name))

    async def diff(self, before: str, after: str) -> dict[str, Any]:
        """{table: {primary_key, added_rows, removed_rows, modified_rows, unchanged_count, total_changes}}"""
        return (await self._asked("diff", before, other=self._path(after)))["diff"]

    def _path(self, name: str) -> str:
        if name not in self.paths:
            raise EnvError(f"there is no database {name!r}; known: {', '.join(sorted(self.paths)) or 'none'}")
        return self.paths[name]

    async def _asked(self, op: str, name: str, **more: Any) -> dict[str, Any]:
        request = {"op": op, "path": self._path(name), "seconds": self._seconds, **more}
        done = await self._sandbox.exec(
            ["python3", "-I", await self._placed(), "sqlite"],
            stdin=msgspec.json.encode(request),
            timeout=self._seconds + _MARGIN_S,
            max_output=64 * 2**20,
        )
        try:
            answer: dict[str, Any] = msgspec.json.decode(done.stdout)
        except msgspec.DecodeError as error:
            raise EnvError(f"database {name} could not be asked: {done.text[-500:] or 'no answer'}") from error
        if not answer["ok"]:
            raise EnvError(answer["error"])
        return answer

    async def _placed(self) -> str:
        if self._program is None:
            path = program_path()
            await self._sandbox.write(path, archive(), mode=0o444)
            self._program = path
        return self._program


def program_path() -> str:
    return f"/tmp/rollyard-inside-{hashlib.sha256(archive()).hexdigest()[:12]}.zip"
