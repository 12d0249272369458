"""Files over the SDK: contents by its file calls, which are exact; everything else by small scripts, which know why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

from rollyard.core.errors import (
    ConfigError,
    Error,
    PathError,
    SandboxError,
    SandboxGone,
    SandboxInterrupted,
    SandboxUnavailable,
)
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Stat
from rollyard.sandbox import tars
from rollyard.sandbox.e2b.faults import speaking
from rollyard.sandbox.e2b.programs import ROOT, Programs
from rollyard.sandbox.retry import LOOKS, retrying
from rollyard.sandbox.shim import STEP_S

_FORMAT = "%f\\0%y\\0%s\\0%m\\0%T@\\0%l\\0"
_STAT = f'[ -e "$1" ] || [ -L "$1" ] || exit 2; find "$1" -maxdepth 0 -printf \'{_FORMAT}\''
_LIST = (
    '[ -e "$1" ] || exit 2; [ -d "$1" ] || exit 20; [ -r "$1" ] || exit 13; '
    f"find \"$1/\" -mindepth 1 -maxdepth 1 -printf '{_FORMAT}'"
)
_MKDIR = '[ -d "$1" ] && exit 0; [ -e "$1" ] && exit 17; mkdir -p -- "$1" && chmod "$2" "$1"'
_REMOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 2; rm -rf -- "$1"'
_WHY = """p=$1; [ -d "$p" ] && exit 21
if [ "$2" = r ]; then
[ -e "$p" ] || { while [ ! -e "$p" ]; do p=$(dirname "$p"); done; [ -d "$p" ] || exit 20; exit 2; }
[ -r "$p" ] || exit 13; exit 5; fi
while [ "$p" != / ] && [ ! -e "$p" ]; do p=$(dirname "$p"); [ -e "$p" ] && [ ! -d "$p" ] && exit 20; done
[ -w "$p" ] || exit 13; exit 5
"""
_CODES = {2: "ENOENT", 5: "EIO", 13: "EACCES", 17: "EEXIST", 20: "ENOTDIR", 21: "EISDIR"}
_KINDS = {"f": "file", "d": "dir", "l": "symlink"}
_TREE_S = 600.0
_PART = 64 * 2**20  # servers bound the size of one file


class Files(Programs):
    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(path, "EINVAL", hint="a path is not empty and has no NUL")
        return posixpath.normpath(posixpath.join(self._workdir, path)).replace("//", "/")

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        return await retrying(lambda: self._read(path, max_bytes), LOOKS, idempotent=True)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        data = bytearray()
        async with contextlib.AsyncExitStack() as stack:
            try:
                with speaking(self.id, self._key):
                    stream = await self._box.files.read(
                        self._path(path), format="stream", user=self._user, request_timeout=_TREE_S
                    )
                    if hasattr(stream, "aclose"):
                        stack.push_async_callback(stream.aclose)
                    async for chunk in stream:
                        data += chunk
                        if len(data) > max_bytes:
                            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
            except (SandboxError, ConfigError) as error:
                raise await self._why(path, "r", error) from None
        return bytes(data)

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        return (await self.read(path, max_bytes=max_bytes)).decode()

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        try:
            await self._put(self._path(path), data, user)
        except (SandboxError, ConfigError) as error:
            raise await self._why(path, "w", error) from None
        if mode is not None:
            await self._again('chmod "$2" "$1"', path, f"{mode:o}", user=user)

    async def _put(self, place: str, data: bytes | str, user: str | None) -> None:
        async def put() -> None:
            with speaking(self.id, self._key):
                await self._box.files.write(place, data, user=user or self._user, request_timeout=_TREE_S)

        await retrying(put, LOOKS, idempotent=True)

    async def _why(self, path: str, way: Literal["r", "w"], error: Error) -> Error:
        """The reason a file call failed, asked of the sandbox itself."""
        if isinstance(error, PathError | SandboxGone | SandboxInterrupted | SandboxUnavailable):
            return error
        if "NotEnoughSpace" in str(error):
            return PathError(path, "ENOSPC", hint="the disk is full")
        done = await self.script(_WHY, self._path(path), way)
        return PathError(path, _CODES.get(done.exit_code or 0, "EIO"), hint=error.message)

    async def _again(self, script: str, path: str, *args: str, user: str | None = None) -> bytes:
        """A step that does no harm when it is done twice."""
        return await retrying(lambda: self._step(script, path, *args, user=user), LOOKS, idempotent=True)

    async def _step(
        self, script: str, path: str, *args: str, user: str | None = None, timeout: float = STEP_S
    ) -> bytes:
        done = await self.script(script, self._path(path), *args, user=user, timeout=timeout)
        if done.exit_code in _CODES:
            raise PathError(path, _CODES[done.exit_code])
        if not done.ok:
            raise PathError(path, _said(done.text), hint=done.text[-200:].strip())
        return done.stdout

    async def exists(self, path: str) -> bool:
        return await self._again('[ -e "$1" ] && echo yes; exit 0', path) == b"yes\n"

    async def stat(self, path: str) -> Stat:
        (found,) = _stats(await self._again(_STAT, path))
        return Stat(path=path, **found[1])

    async def list_dir(self, path: str) -> list[Stat]:
        found = _stats(await self._again(_LIST, path))
        return [
            Stat(path=posixpath.join(path, name), **fields) for name, fields in sorted(found, key=lambda one: one[0])
        ]

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        await self._again(_MKDIR, path, f"{mode:o}", user=user)

    async def remove(self, path: str) -> None:
        await self._step(_REMOVE, path)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        """What is in `source` goes into `path`, which is made if it is absent."""
        if not Path(source).is_dir():
            raise ConfigError(f"{source} is not a directory of this machine")
        carried = f"{ROOT}/x/{new_id('tar')}"
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(tars.pack, source, ".", (0, 0), archive)
            archive.seek(0)
            number = 0
            while part := archive.read(_PART):
                await self._put(f"{carried}.{number:04d}", part, user)
                number += 1
        unpack = 'mkdir -p -- "$1" && cat "$2".* | tar -xpf - -C "$1" --no-same-owner; c=$?; rm -f "$2".*; [ $c = 0 ] || exit 100'
        await self._step(unpack, path, carried, user=user, timeout=_TREE_S)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> None:
        """What is in the directory `path` goes into `target` on this machine, which is made if it is absent."""
        carried = f"{ROOT}/x/{new_id('tar')}"
        pack = '[ -e "$1" ] || exit 2; cd -P -- "$1" || exit 20; tar -cf "$2" -C .. "$(basename "$PWD")" || exit 100'
        await self._step(pack, path, carried, timeout=_TREE_S)
        Path(target).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            archive.write(await self.read(carried, max_bytes=max_bytes + 2**26))
            await self.remove(carried)
            archive.seek(0)
            await asyncio.to_thread(tars.unpack, os.dup(archive.fileno()), target, max_bytes)

    async def alive(self) -> bool:
        try:
            with speaking(self.id, self._key):
                return bool(await self._box.is_running(request_timeout=15))
        except Error:
            return False


def _stats(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    words = raw.split(b"\0")[:-1]
    found: list[tuple[str, dict[str, Any]]] = []
    for at in range(0, len(words), 6):
        name, kind, size, mode, when, target = words[at : at + 6]
        named = cast(Literal["file", "dir", "symlink", "other"], _KINDS.get(kind.decode(), "other"))
        found.append((
            name.decode("utf-8", "surrogateescape"),
            {
                "kind": named,
                "size": int(size),
                "mode": int(mode, 8),
                "mtime": float(when),
                "target": target.decode("utf-8", "surrogateescape") if named == "symlink" else None,
            },
        ))  # fmt: skip
    return found


def _said(text: str) -> str:
    signs = {
        "No space left": "ENOSPC",
        "Permission denied": "EACCES",
        "Read-only": "EROFS",
        "Not a directory": "ENOTDIR",
    }
    return next((name for sign, name in signs.items() if sign in text), "EIO")
