"""Databases of an instance: describe, query, snapshot, difference. `Databases` is the API, `SandboxDatabases` a sandbox's files.

Reading is the default; rows and seconds are capped. The files are opened where they are, in the sandbox, by a program that is
put there: a file that an agent may have written is never opened by the host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import EnvError, Error
from rollyard.core.protocols import Job, Sandbox
from rollyard.inside.verifier import archive

MAX_ROWS = 10_000
SECONDS = 10.0
_MARGIN_S = 20.0
_SAID_BYTES = 64 * 2**20
_MAX_LINE = 256 * 2**20
_T = TypeVar("_T")


class QueryRows(msgspec.Struct, frozen=True, kw_only=True):
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
    ) -> QueryRows: ...


class SandboxDatabases:
    """`paths` are the SQLite files by the name that they are asked for."""

    def __init__(self, sandbox: Sandbox, paths: Mapping[str, str], *, seconds: float = SECONDS) -> None:
        self.paths = dict(paths)
        self._program = _Program(sandbox, seconds + _MARGIN_S)
        self._seconds = seconds

    async def names(self) -> Sequence[str]:
        return tuple(self.paths)

    async def describe(self, name: str) -> list[Table]:
        return _read(name, (await self._ask("describe", name)).get("tables"), list[Table])

    async def query(
        self, name: str, sql: str, args: Sequence[Any] = (), *, read_only: bool = True, max_rows: int = MAX_ROWS
    ) -> QueryRows:
        answer = await self._ask("query", name, sql=sql, args=list(args), read_only=read_only, max_rows=max_rows)
        return _read(name, {key: value for key, value in answer.items() if key != "ok"}, QueryRows)

    async def snapshot(self, name: str, path: str) -> None:
        """A consistent copy of one at `path`, which is replaced."""
        await self._ask("copy", name, target=path)

    async def restore(self, name: str, source: str) -> None:
        """Make `name` what `source` is."""
        await self._ask("copy", source, target=self._path(name))

    async def diff(self, before: str, after: str) -> dict[str, Any]:
        """{table: {primary_key, added_rows, removed_rows, modified_rows, unchanged_count, total_changes}}"""
        return _read(before, (await self._ask("diff", before, other=self._path(after))).get("diff"), dict[str, Any])

    def _path(self, name: str) -> str:
        if name not in self.paths:
            raise EnvError(f"there is no database {name!r}; known: {', '.join(sorted(self.paths)) or 'none'}")
        return self.paths[name]

    async def _ask(self, op: str, name: str, **more: Any) -> dict[str, Any]:
        request = {"op": op, "path": self._path(name), "seconds": self._seconds, **more}
        try:
            answer = msgspec.json.decode(await self._program.ask(msgspec.json.encode(request)), type=dict[str, Any])
        except BAD_JSON as error:
            raise EnvError(f"database {name} could not be asked: its answer is not whole") from error
        if answer.get("ok") is not True:
            raise EnvError(str(answer.get("error")))
        return answer


class _Program:
    """The program in the sandbox: one line in, one line out, one at a time. It is started by the first question and lives as
    long as the sandbox, unless it fails or has said so much that its output had better begin anew."""

    def __init__(self, sandbox: Sandbox, timeout_s: float) -> None:
        self._sandbox, self._timeout_s = sandbox, timeout_s
        self._lock = asyncio.Lock()
        self._job: Job | None = None
        self._lines: AsyncIterator[bytes] | None = None
        self._said = 0

    async def ask(self, request: bytes) -> bytes:
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._ask(request)
            except BaseException as error:  # cancelled too: its next answer would be this one's
                await self._end()
                if isinstance(error, TimeoutError):
                    raise EnvError(f"no answer from the database within {self._timeout_s:g} s") from error
                raise
            self._said += len(answer)
            if self._said > _SAID_BYTES:
                await self._end()
            return answer

    async def _ask(self, request: bytes) -> bytes:
        if self._job is None or self._lines is None:
            path = program_path()
            await self._sandbox.write(path, archive(), mode=0o444)
            self._job = await self._sandbox.start(["python3", "-I", path, "sqlite"], stdin=True)
            self._lines = _lines(self._job)
            self._said = 0
        await self._job.write(request + b"\n")
        try:
            return await anext(self._lines)
        except StopAsyncIteration:
            words = (await self._job.tail(stderr=True)).decode("utf-8", "backslashreplace").strip()
            raise EnvError(f"the database's program ended: {words[-500:] or 'no output'}") from None

    async def _end(self) -> None:
        job, self._job, self._lines = self._job, None, None
        if job is not None:
            try:
                await job.kill()
            except Error:  # it went with its sandbox
                return


async def _lines(job: Job) -> AsyncIterator[bytes]:
    held = b""
    async for _, chunk in job.stream():
        held += chunk
        if len(held) > _MAX_LINE:
            raise EnvError(f"the database's program wrote more than {_MAX_LINE >> 20} MB without an end")
        *whole, held = held.split(b"\n")
        for line in whole:
            yield line


def program_path() -> str:
    return f"/tmp/rollyard-inside-{hashlib.sha256(archive()).hexdigest()[:12]}.zip"


def _read(name: str, answer: Any, kind: type[_T]) -> _T:
    """What the program in the sandbox says, which is not ours alone."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise EnvError(f"database {name} could not be asked: its answer is no {kind}: {error}") from error
