"""Tasks of a large set, kept from one load to the next: a folder whose files have not changed is not read and hashed again.

What says that nothing has changed is, of every file of the folder, its name, kind, size, inode and times (also the time of the
last change of these, which no program can set); and of the code that reads folders, its bytes. A folder that changed just now is
read again, as a clock is too coarse to tell two changes of one moment apart; and one with keys that are told of, to tell again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import msgspec

from rollyard.core.cache import cache_home, replace_file
from rollyard.core.task import Task
from rollyard.tasks.harbor.load import load_folder
from rollyard.tasks.harbor.taskfile import read_toml, unknown_notes

_SETTLED_S = 3.0
FEWEST = 50  # a smaller set is read as fast


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    state: bytes
    task: msgspec.Raw


class _IndexFile(msgspec.Struct, array_like=True):
    code: bytes
    entries: dict[str, _Entry]


class FolderIndex:
    """`with FolderIndex(places) as index: index.load(folder)`, of folders in these places. Not knowing is no error: the folder is
    read then."""

    def __init__(self, places: Collection[Path], cache: Path | None = None, *, settled_s: float = _SETTLED_S) -> None:
        self._settled_s = settled_s
        named = "\0".join(sorted(map(str, places)))
        name = hashlib.sha256(named.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._file = (cache or cache_home()) / "datasets" / "indexes" / f"{name}.msgpack"
        self._old: dict[str, _Entry] = {}
        self._new: dict[str, _Entry] = {}

    def __enter__(self) -> FolderIndex:
        try:
            read = msgspec.msgpack.decode(self._file.read_bytes(), type=_IndexFile)
            self._old = read.entries if read.code == _code() else {}
        except (OSError, msgspec.DecodeError):
            pass
        return self

    def load(self, folder: Path) -> Task:
        key, (state, changed) = str(folder), _state(str(folder))
        known = self._old.get(key)
        if known is not None and known.state == state:
            self._new[key] = known
            return msgspec.msgpack.decode(known.task, type=Task)
        task = load_folder(folder)
        if time.time() - changed >= self._settled_s and not unknown_notes(read_toml(folder / "task.toml")):
            self._new[key] = _Entry(state, msgspec.Raw(msgspec.msgpack.encode(task)))
        return task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if any(self._old.get(key) is not entry for key, entry in self._new.items()):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, msgspec.msgpack.encode(_IndexFile(_code(), {**self._old, **self._new})))


@functools.cache
def _code() -> bytes:
    """The bytes of what reads folders: another version reads them anew."""
    outer = hashlib.sha256()
    for package in ("rollyard.core", "rollyard.tasks.harbor"):
        for file in sorted(importlib.resources.files(package).iterdir(), key=lambda item: item.name):
            if file.name.endswith(".py"):
                outer.update(file.read_bytes())
    return outer.digest()


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
