"""The file of a SQLite store: whether it may be opened or made, who may read it, copies of it, and SQLite's errors in one line.

A store holds everything agents said and, under a control plane, signing secrets. Its file is made readable by its owner alone;
SQLite gives the files beside it (`-wal`, `-shm`) the same mode.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from rollyard.core.errors import ConfigError, StoreError
from rollyard.core.log import Log
from rollyard.store.partial_files import partial_name, remove_dead_parts

BUSY_MS = 30_000  # how long another process may hold the write lock
_SIDES = ("", "-wal", "-shm")
_log = Log("rollyard.store")
_ADVICE = {  # by the first word that fits the name of SQLite's error
    "SQLITE_NOTADB": "name a file that rollyard made, or restore a backup with `rollyard store restore`",
    "SQLITE_CORRUPT": "the file is damaged: restore a backup with `rollyard store restore`",
    "SQLITE_READONLY": "make the file and its folder writable for this user, or name another with --store",
    "SQLITE_CANTOPEN": "make the file and its folder writable for this user, or name another with --store",
    "SQLITE_FULL": "free space on its disk",
    "SQLITE_IOERR": "check its disk: is it full?",
    "SQLITE_BUSY": "another process is writing to it: wait for that process, or end it",
}


def check_place(path: Path, *, create: bool) -> None:
    """Refuse what cannot be a store, and without `create` what is not there, before anything is opened."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if not create:
            raise missing_error(str(path)) from None
        if not path.parent.is_dir():
            raise ConfigError(
                f"{path.parent} is not a directory", hint="make it, or choose another place for the store"
            ) from None
        return
    except OSError as error:
        raise StoreError(f"cannot open the store {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "device, pipe or socket"
        raise StoreError(f"{path} is a {kind}, not a store", hint="name a file, such as runs.db")


def missing_error(where: str) -> StoreError:
    return StoreError(
        f"no store at {where}", hint=f"create one with `rollyard run TASKS --store {where}`, or name another store"
    )


def make_file(path: Path) -> None:
    """An empty file that its owner alone may read. One that is there already stays as it is, and is never opened: closing it
    would release the locks that SQLite holds on it for this process."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass


def identify(path: Path) -> tuple[int, int] | None:
    """Which file has this name; None where none has."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def is_foreign(path: Path, *, create: bool) -> bool:
    """Whether a file is of another program, so that nothing of it may be changed. An empty one is free for a store to be made
    in. SQLite itself looks, for the reason that `make_file` gives."""
    try:
        with closing(connect(path, "ro")()) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        return error.sqlite_errorname == "SQLITE_NOTADB"
    return "rollouts" not in tables if tables else not create


def keep_private(path: Path, *, required: bool) -> None:
    """Take the permissions of others from a file of ours. One that stays wider is refused where secrets are to lie in it."""
    mode = _mode(path)
    if not mode & 0o077:
        return
    if path.stat().st_uid == os.geteuid():
        with suppress(OSError):  # a disk that takes no writes, or has no modes
            for name in ("-wal", "-shm", ""):
                side = Path(f"{path}{name}")
                if side.exists():
                    side.chmod(0o600)
        if not _mode(path) & 0o077:
            _log.warning("%s was readable by other users (mode %03o); it is now its owner's alone (600)", path, mode)
            return
    if required:
        raise StoreError(
            f"other users can read or write {path} (mode {mode:03o}), and a control plane keeps its signing secrets there",
            hint=f"chown it to this user and chmod 600 {path}, or choose another --store",
        )


def connect(path: Path, mode: str = "rw", **options: object) -> Callable[[], sqlite3.Connection]:
    """A maker of connections that never make a file."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return lambda: sqlite3.connect(uri, uri=True, timeout=BUSY_MS / 1000, **options)  # type: ignore[call-overload]


def explain(error: Exception, where: str) -> StoreError:
    """An error of the file or of SQLite as one line that names the file."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    name = getattr(origin, "sqlite_errorname", None) or ""
    words = (origin.strerror or type(origin).__name__) if isinstance(origin, OSError) else str(origin)
    if isinstance(origin, PermissionError):
        name = "SQLITE_CANTOPEN"
    advice = next((text for start, text in _ADVICE.items() if name.startswith(start)), None)
    return StoreError(f"cannot use the store {where}: {words}", hint=advice)


def copy(path: Path, target: Path) -> None:
    """All of one snapshot in a new file, complete and compact; it is itself a store. It appears under its name when it is
    complete."""
    _check_free(target, "choose a new file")
    remove_dead_parts(target)
    aside = partial_name(target)
    try:
        make_file(aside)
    except OSError as error:
        raise StoreError(f"cannot make {target}: {error.strerror}") from error
    try:
        with closing(connect(path, isolation_level=None)()) as raw:
            raw.execute("VACUUM INTO ?", (str(aside),))
        aside.rename(target)
    except (sqlite3.Error, OSError) as error:
        aside.unlink(missing_ok=True)
        raise explain(error, str(path)) from error


def restore(backup: Path, target: Path) -> None:
    """Put a backup in the place of a store that is not there (any more), after checking that it is whole."""
    check_place(backup, create=False)
    _check_free(target, "move it away first, with its -wal and -shm files")
    try:
        with closing(connect(backup)()) as raw:
            found = raw.execute("PRAGMA integrity_check").fetchone()[0]
            ours = raw.execute("SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'").fetchone()[0]
    except sqlite3.Error as error:
        raise explain(error, str(backup)) from error
    if found != "ok":
        raise StoreError(f"{backup} is damaged: {found}", hint="restore another backup")
    if not ours:
        raise StoreError(f"{backup} is a database, but not a store of rollyard", hint="name a backup of a store")
    copy(backup, target)


def _check_free(target: Path, advice: str) -> None:
    """Refuse a place where no new store can be made."""
    if not target.name:
        raise ConfigError("the new store has no name", hint="give a path such as backup.db")
    for name in _SIDES:
        if os.path.lexists(f"{target}{name}"):
            raise ConfigError(f"{target}{name} exists", hint=advice)
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a directory", hint="make it, or choose another place")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
