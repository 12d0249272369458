"""`Store`: the durable record of runs, rollouts, calls, events and bodies.

    async with Store.open("runs.db") as store: ...

Each method is one transaction or one consistent read. A method that writes returns once the write would survive SIGKILL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rollyard.core.call import CallRecord
from rollyard.core.delta import Blob
from rollyard.core.errors import ConfigError
from rollyard.core.node import Node
from rollyard.core.protocols import SessionRecord
from rollyard.core.trajectory import Trajectory
from rollyard.store import blobs, calls
from rollyard.store.database import Database
from rollyard.store.migrate import prepare
from rollyard.store.sqlite import SQLite, Synchronous


class Store:
    """Made by `Store.open`. It is a `CallLog` for the gate."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    @asynccontextmanager
    async def open(cls, where: str | Path, *, synchronous: Synchronous = "normal") -> AsyncGenerator[Store]:
        """`where` is a path, `sqlite:///path` or `postgresql://user@host/name`. A new database is set up; an older one is
        brought up to date; a newer one is refused."""
        database = _database(str(where), synchronous)
        try:
            await prepare(database)
            yield cls(database)
        finally:
            await database.aclose()

    # calls: what the gate needs

    async def commit(self, record: CallRecord, nodes: Sequence[Node], blobs: Mapping[bytes, Blob]) -> None:
        """Keep one call with the nodes and bodies it added. Raises `SessionClosed` once its session is closed."""
        await self._database.write(partial(calls.commit, record=record, added=nodes, bodies=blobs))

    async def save_session(self, session: SessionRecord) -> None:
        await self._database.write(partial(calls.save_session, session=session))

    async def close_session(self, rollout_id: str, at: float) -> None:
        """From here on `commit` refuses calls of this rollout."""
        await self._database.write(partial(calls.close_session, rollout_id=rollout_id, at=at))

    async def sessions(self) -> Sequence[SessionRecord]:
        return await self._database.read(calls.all_sessions)

    async def load_calls(self, rollout_id: str) -> tuple[Sequence[CallRecord], Sequence[Node]]:
        return await self._database.read(partial(calls.load, rollout_id=rollout_id))

    async def load_blob(self, digest: bytes) -> bytes:
        return await self._database.read(partial(blobs.get, digest=digest))

    async def trajectory(self, rollout_id: str) -> Trajectory:
        """The graph of a rollout's calls, as it was when the last of them was committed."""
        return Trajectory.restore(rollout_id, *await self.load_calls(rollout_id))


def _database(where: str, synchronous: Synchronous) -> Database:
    scheme, separator, rest = where.partition("://")
    if not separator:
        return _sqlite(Path(where), synchronous)
    if scheme == "sqlite":
        return _sqlite(Path(rest.removeprefix("/")), synchronous)
    if scheme in ("postgresql", "postgres"):
        from rollyard.store.postgres import Postgres

        return Postgres(where)
    raise ConfigError(f"no store at {scheme}://", hint="give a path, sqlite:///path or postgresql://...")


def _sqlite(path: Path, synchronous: Synchronous) -> SQLite:
    if not path.name or path.name == ":memory:":
        raise ConfigError("a store needs a file", hint="give a path such as runs.db")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory", hint="make it, or choose another place for the store")
    return SQLite(path, synchronous=synchronous)
