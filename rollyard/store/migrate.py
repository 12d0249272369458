"""Bringing a database to the newest schema.

A database that is up to date costs one query, and a new one is made from the tables directly; alembic, which is slow to
import, is only used for one that is behind. Both ways lead to the same schema, which a test proves.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from rollyard.core.errors import StoreError
from rollyard.core.log import Log
from rollyard.store.database import Database
from rollyard.store.schema import HEAD, metadata
from rollyard.store.sqlite_file import missing_error

MIGRATIONS = Path(__file__).parent / "migrations"
UNFINISHED = "copying-"  # how the version of a target of `copy_store` begins until all rows are in it
TELL_FIRST_S, TELL_EVERY_S = 2.0, 10.0  # of a migration that takes so long
_log = Log("rollyard.store")
_LOCK = 7_031_115_901  # any number that is ours: PostgreSQL's advisory lock while the schema is made


async def prepare(database: Database, *, create: bool) -> None:
    """Without `create` a database that has no tables of ours is refused, and nothing is written to it."""
    version = await database.read(current)
    if version is None and not create:
        raise missing_error(database.where)
    if version is None:
        await database.prepare(partial(bring_up_to_date, where=database.where))
    elif version != HEAD:
        await _migrate(database, version)


class MigrationProgress:
    """How far a migration has come: what waits for it reads this, and may end it."""

    def __init__(self) -> None:
        self.began = self.ended = False
        self.done, self.total = 0, 0

    def add(self, count: int) -> None:
        self.done += count
        if self.ended:
            raise StoreError("the migration was broken off", hint="it begins anew with the next command")


async def _migrate(database: Database, version: str) -> None:
    """However long it takes; a person who waits is told of it. Broken off or killed, it leaves the old version."""
    progress = MigrationProgress()
    telling = asyncio.create_task(_tell(database.where, version, progress))
    try:
        await database.alter(partial(bring_up_to_date, where=database.where, progress=progress))
    finally:
        progress.ended = True
        telling.cancel()
    _log.warning("%s has schema %s now, before %s: older versions of rollyard refuse it", database.where, HEAD, version)


async def _tell(where: str, version: str, progress: MigrationProgress) -> None:
    every = TELL_FIRST_S
    while True:
        await asyncio.sleep(every)
        every = TELL_EVERY_S
        if not progress.began:
            _log.warning("%s is of an older version: waiting for the process that migrates it or writes to it", where)
            continue
        share = f"{100 * progress.done // progress.total} % of its calls are done" if progress.total else "please wait"
        _log.warning("migrating %s (schema %s to %s): %s", where, version, HEAD, share)


def bring_up_to_date(connection: Connection, where: str, progress: MigrationProgress | None = None) -> None:
    """It may happen twice."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    progress = progress or MigrationProgress()
    progress.began = True
    version = current(connection)
    if version == HEAD:
        return
    if version is not None and version.startswith(UNFINISHED):
        raise StoreError(
            f"{where} is the unfinished copy of another store",
            hint="give the same `rollyard store copy` again: it goes on from there",
        )
    if version is not None:
        upgrade(connection, version, where, progress)
        return
    if connection.dialect.name == "sqlite" and (others := inspect(connection).get_table_names()):
        raise StoreError(
            f"{where} is a database of another program: it has the table {others[0]!r}", hint="name another file"
        )
    metadata.create_all(connection)
    columns = "version_num VARCHAR(32) NOT NULL CONSTRAINT alembic_version_pkc PRIMARY KEY"
    connection.execute(text(f"CREATE TABLE alembic_version ({columns})"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def current(connection: Connection) -> str | None:
    """The version a database has; None for one with no tables of ours."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(
    connection: Connection,
    version: str | None,
    where: str = "this database",
    progress: MigrationProgress | None = None,
) -> None:
    """Run the migrations after `version` (all of them for None), inside the connection's transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise StoreError(
            f"{where} has schema {version}, newer than this version of rollyard knows",
            hint="update rollyard, or open another store",
        )
    config.attributes |= {"connection": connection, "progress": progress or MigrationProgress()}
    command.upgrade(config, "head")
