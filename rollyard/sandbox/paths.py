"""Paths of a sandbox by small scripts: they follow links as the sandbox does, and know why something failed.

For backends that can run a short command and put a file; contents are theirs to carry. Needs /bin/sh, GNU find and tar inside.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import posixpath
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast

from rollyard.core.errors import ConfigError, PathError
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Exit, Stat
from rollyard.images import tars
from rollyard.sandbox.job_shim import STEP_S
from rollyard.sandbox.retry import LOOKS, retry_open

ROOT = "/tmp/.rollyard"  # what is ours in a sandbox
TREE_S = 600.0
CODES = {2: "ENOENT", 5: "EIO", 13: "EACCES", 17: "EEXIST", 20: "ENOTDIR", 21: "EISDIR"}
_FORMAT = "%f\\0%y\\0%s\\0%m\\0%T@\\0%l\\0"
_STAT = f'[ -e "$1" ] || [ -L "$1" ] || exit 2; find "$1" -maxdepth 0 -printf \'{_FORMAT}\''
_LIST = (
    '[ -e "$1" ] || exit 2; [ -d "$1" ] || exit 20; [ -r "$1" ] || exit 13; '
    f"find \"$1/\" -mindepth 1 -maxdepth 1 -printf '{_FORMAT}'"
)
_MKDIR = '[ -d "$1" ] && exit 0; [ -e "$1" ] && exit 17; mkdir -p -- "$1" && chmod "$2" "$1"'
_REMOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 2; rm -rf -- "$1"'
_UNPACK = (
    'mkdir -p -- "$1" && cat "$2".* | gzip -dc | tar -xpf - -C "$1" --no-same-owner; c=$?; rm -f "$2".*; '
    "[ $c = 0 ] || exit 100"
)
_PACK = '[ -e "$1" ] || exit 2; cd -P -- "$1" || exit 20; tar -cf "$2" -C .. "$(basename "$PWD")" || exit 100'
_KINDS = {"f": "file", "d": "dir", "l": "symlink"}
_SIGNS = {
    "No space left": "ENOSPC",
    "Permission denied": "EACCES",
    "Read-only": "EROFS",
    "Not a directory": "ENOTDIR",
    "File name too long": "ENAMETOOLONG",
}
_LEVEL = 1
_PART = 32 * 2**20  # servers bound the size of one file


class PathSteps(ABC):
    """What is the same for all of them; a backend's class adds how a script runs, how a file goes in, and `read`."""

    _workdir: str

    @abstractmethod
    async def script(self, script: str, *args: str, user: str | None = None, timeout: float = STEP_S) -> Exit: ...
    @abstractmethod
    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes: ...
    @abstractmethod
    async def _put(self, place: str, data: bytes, user: str | None) -> None: ...

    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(path, "EINVAL", hint="a path is not empty and has no NUL")
        return posixpath.normpath(posixpath.join(self._workdir, path)).replace("//", "/")

    async def _repeat_step(
        self, script: str, path: str, *args: str, user: str | None = None, timeout: float = STEP_S
    ) -> bytes:
        """A step that does no harm when it is done twice."""
        return await retry_open(
            lambda: self._step(script, path, *args, user=user, timeout=timeout), LOOKS, idempotent=True
        )

    async def _step(
        self, script: str, path: str, *args: str, user: str | None = None, timeout: float = STEP_S
    ) -> bytes:
        done = await self.script(script, self._path(path), *args, user=user, timeout=timeout)
        if done.exit_code in CODES:
            raise PathError(path, CODES[done.exit_code])
        if not done.ok:
            code = next((name for sign, name in _SIGNS.items() if sign in done.text), "EIO")
            raise PathError(path, code, hint=done.text[-200:].strip())
        return done.stdout

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        return (await self.read(path, max_bytes=max_bytes)).decode()

    async def exists(self, path: str) -> bool:
        return await self._repeat_step('[ -e "$1" ] && echo yes; exit 0', path) == b"yes\n"

    async def stat(self, path: str) -> Stat:
        (found,) = _stats(await self._repeat_step(_STAT, path))
        return Stat(path=path, **found[1])

    async def list_dir(self, path: str) -> list[Stat]:
        found = _stats(await self._repeat_step(_LIST, path))
        return [
            Stat(path=posixpath.join(path, name), **fields) for name, fields in sorted(found, key=lambda one: one[0])
        ]

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        await self._repeat_step(_MKDIR, path, f"{mode:o}", user=user)

    async def remove(self, path: str) -> None:
        await self._step(_REMOVE, path)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        """What is in `source` goes into `path`, which is made if it is absent."""
        if not Path(source).is_dir():
            raise ConfigError(f"{source} is not a directory of this machine")
        carried = f"{ROOT}/x/{new_id('tar')}"
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, source, archive)
            archive.seek(0)
            number = 0
            while part := archive.read(_PART):
                await self._put(f"{carried}.{number:04d}", part, user)
                number += 1
        await self._step(_UNPACK, path, carried, user=user, timeout=TREE_S)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> int:
        """What is in the directory `path` goes into `target` on this machine, which is made if it is absent."""
        carried = f"{ROOT}/x/{new_id('tar')}"
        await self._step(_PACK, path, carried, timeout=TREE_S)
        Path(target).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            archive.write(await self.read(carried, max_bytes=max_bytes + 2**26))
            await self.remove(carried)
            archive.seek(0)
            return await asyncio.to_thread(tars.unpack, os.dup(archive.fileno()), target, max_bytes)


def _pack(source: str, archive: IO[bytes]) -> None:
    """Compressed: what goes to a provider goes over a network."""
    with gzip.GzipFile(fileobj=archive, mode="wb", compresslevel=_LEVEL, mtime=0) as packed:
        tars.pack(source, ".", (0, 0), cast(BinaryIO, packed))


def _stats(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    words = raw.split(b"\0")[:-1]
    found: list[tuple[str, dict[str, Any]]] = []
    for at in range(0, len(words), 6):
        name, kind, size, mode, when, target = words[at : at + 6]
        named = cast(Literal["file", "dir", "symlink", "other"], _KINDS.get(kind.decode(), "other"))
        fields = {"kind": named, "size": int(size), "mode": int(mode, 8), "mtime": float(when)}
        link = target.decode("utf-8", "surrogateescape") if named == "symlink" else None
        found.append((name.decode("utf-8", "surrogateescape"), {**fields, "target": link}))
    return found
