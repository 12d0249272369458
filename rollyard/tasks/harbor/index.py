"""Tasks of a large set, kept from one load to the next: a folder whose files have not changed is not read and hashed again.

What says that nothing has changed is, of every file of the folder, its name, kind, size, inode and times (also the time of the
last change of these, which no program can set); and of the code that reads folders, its bytes. A folder that changed just now is
read again, as a clock is too coarse to tell two changes of one moment apart; and one with keys that are reported, to report
them again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import os
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import msgspec

from rollyard.core.cache import cache_home
from rollyard.core.task import Task
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.harbor.taskfile import read_toml, unknown_notes

_SETTLED_S = 3.0
_BATCH = 200  # folders whose tasks wait to be written
_TABLE = "CREATE TABLE IF NOT EXISTS folders (folder BLOB PRIMARY KEY, state BLOB, task BLOB) WITHOUT ROWID"


class FolderIndex:
    """`with FolderIndex(places) as index: index.load(folder)`, of folders in these places. Not knowing is no error: the folder is
    read then. What is known stays on disk, and each task is read from there when it is asked for."""

    def __init__(self, places: Collection[Path], cache: Path | None = None, *, settled_s: float = _SETTLED_S) -> None:
        self._settled_s = settled_s
        named = "\0".join(sorted(map(str, places)))
        name = hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._file = (cache or cache_home()) / "datasets" / "indexes" / f"{name}.sqlite"
        self._base: sqlite3.Connection | None = None
        self._waiting: list[tuple[bytes, bytes, bytes]] = []

    def __enter__(self) -> FolderIndex:
        if self._file.is_file():
            self._base = _open_index(self._file)
        return self

    def load(self, folder: Path) -> Task:
        try:
            key, (state, changed) = os.fsencode(folder), _state(str(folder))
        except OSError:  # a part of it cannot be looked into; whether that matters is for its reader to say
            return load_folder(folder)
        if (known := self._find(key, state)) is not None:
            return known
        task = load_folder(folder)
        if time.time() - changed >= self._settled_s and not unknown_notes(read_toml(folder / "task.toml")):
            self._waiting.append((key, state, msgspec.msgpack.encode(task)))
            if len(self._waiting) >= _BATCH:
                self._write()
        return task

    def _find(self, key: bytes, state: bytes) -> Task | None:
        if self._base is None:
            return None
        try:
            row = self._base.execute("SELECT task FROM folders WHERE folder = ? AND state = ?", (key, state)).fetchone()
            return None if row is None else msgspec.msgpack.decode(row[0], type=Task)
        except (sqlite3.Error, msgspec.DecodeError):
            return None

    def _write(self) -> None:
        self._base = self._base or _open_index(self._file)
        if self._base is not None:
            with contextlib.suppress(sqlite3.Error), self._base:
                self._base.executemany("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", self._waiting)
        self._waiting.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._write()
        if self._base is not None:
            self._base.close()


def _open_index(file: Path) -> sqlite3.Connection | None:
    """Empty where other code wrote it, or where it is none; None where it cannot be had, as one that is locked."""
    for _ in range(2):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            base = sqlite3.connect(file, timeout=5.0, check_same_thread=False)
            base.execute("PRAGMA synchronous = OFF")
            base.execute(_TABLE)
            if base.execute("PRAGMA user_version").fetchone()[0] != _code():
                with base:
                    base.execute("DELETE FROM folders")
                    base.execute(f"PRAGMA user_version = {_code()}")
            return base
        except (sqlite3.OperationalError, OSError):
            return None
        except sqlite3.DatabaseError:
            file.unlink(missing_ok=True)
    return None


@functools.cache
def _code() -> int:
    """A number out of the bytes of what reads folders: another version reads them anew."""
    outer = hashlib.sha256()
    for package in ("rollyard.core", "rollyard.tasks.harbor"):
        for file in sorted(importlib.resources.files(package).iterdir(), key=lambda item: item.name):
            if file.name.endswith(".py"):
                outer.update(file.read_bytes())
    return int.from_bytes(outer.digest()[:4], "big") >> 1 | 1


def _state(folder: str) -> tuple[bytes, float]:
    """A hash of what says that a folder has not changed, and when it last did."""
    outer, newest = hashlib.blake2b(digest_size=20), 0
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda item: item.name):
                at = entry.stat(follow_symlinks=False)
                link = os.readlink(entry.path) if entry.is_symlink() else ""  # noqa: PTH115 - many
                newest = max(newest, at.st_ctime_ns)
                seen = f"{at.st_mode} {at.st_size} {at.st_ino} {at.st_mtime_ns} {at.st_ctime_ns}"
                outer.update(f"{entry.path}\0{link}\0{seen}\n".encode("utf-8", "surrogateescape"))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return outer.digest(), newest / 1e9
