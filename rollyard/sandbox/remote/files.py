"""Files by small scripts, which follow links as the sandbox does and know why something failed; large contents by the SDK.

A write goes to a file of ours first and is then copied to its place: an upload that broke half way is seen by nobody.
"""

from __future__ import annotations

import asyncio
import base64
import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

from rollyard.core.errors import ConfigError, PathError
from rollyard.core.ids import new_id
from rollyard.core.sandbox import Stat
from rollyard.sandbox import tars
from rollyard.sandbox.remote.link import speaking
from rollyard.sandbox.remote.programs import ROOT, Programs
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
# Says the size and, for a small file, what is in it; for a large one, where it really is.
_READ = """p=$1; [ -d "$p" ] && exit 21
[ -e "$p" ] || { while [ ! -e "$p" ]; do p=$(dirname "$p"); done; [ -d "$p" ] || exit 20; exit 2; }
[ -r "$p" ] || exit 13
s=$(($(wc -c <"$p"))); echo $s; [ $s -gt $2 ] && exit 0; if [ $s -le $3 ]; then cat <"$p"; else readlink -f "$p"; fi
"""
_SMALL = 2**18
_WRITE = """p=$1; [ -d "$p" ] && exit 21; d=$(dirname "$p")
[ -d "$d" ] || { q=$d; while [ ! -e "$q" ]; do q=$(dirname "$q"); done; [ -d "$q" ] || exit 20; }
mkdir -p -- "$d" || exit 100
if [ -n "$2" ]; then cat <"$2" >"$p"; else printf %s "$4" | base64 -d >"$p"; fi || exit 100
[ -z "$3" ] || chmod "$3" "$p" || exit 100
"""
_INLINE = 24_000  # bytes that go in the command itself
_UNPACK = """mkdir -p -- "$1" && cat "$2".* | tar -xpf - -C "$1" --no-same-owner; c=$?; rm -f "$2".*; [ $c = 0 ] || exit 100"""
_PACK = '[ -e "$1" ] || exit 2; cd -P -- "$1" || exit 20; tar -cf "$2" -C .. "$(basename "$PWD")" || exit 100'
_CODES = {2: "ENOENT", 13: "EACCES", 17: "EEXIST", 20: "ENOTDIR", 21: "EISDIR"}
_SIGNS = {
    "No space left": "ENOSPC",
    "Permission denied": "EACCES",
    "Read-only": "EROFS",
    "Not a directory": "ENOTDIR",
    "File name too long": "ENAMETOOLONG",
}
_KINDS = {"f": "file", "d": "dir", "l": "symlink"}
_TREE_S = 600.0
_PART = 32 * 2**20  # servers bound the size of one file


class Files(Programs):
    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(path, "EINVAL", hint="a path is not empty and has no NUL")
        return posixpath.normpath(posixpath.join(self._workdir, path)).replace("//", "/")

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        size, _, body = (await self._step(_READ, path, str(max_bytes), str(_SMALL), again=True)).partition(b"\n")
        if int(size) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        if int(size) <= _SMALL:
            return body
        return await self._got(body.removesuffix(b"\n").decode())

    async def _got(self, place: str) -> bytes:
        async def get() -> bytes:
            with speaking(self._provider, self.id):
                return await self._link.get(place)

        return await retrying(get, LOOKS, idempotent=True)

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        return (await self.read(path, max_bytes=max_bytes)).decode()

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        self._as_it_is(user)
        raw = data.encode() if isinstance(data, str) else bytes(data)
        mode_text = f"{mode:o}" if mode is not None else ""
        if len(raw) <= _INLINE:
            await self._step(_WRITE, path, "", mode_text, base64.b64encode(raw).decode(), again=True)
            return
        name = new_id("put")
        await self._put(f"{ROOT}/x/{name}", raw)
        try:
            await self._step(_WRITE, path, f"{ROOT}/x/{name}", mode_text, "", again=True, timeout=_TREE_S)
        finally:
            await self._not_needed(name)

    async def _step(self, script: str, path: str, *args: str, again: bool = False, timeout: float = STEP_S) -> bytes:
        """`again` is for those that do no harm when they are done twice."""
        done = await self.script(script, self._path(path), *args, again=again, timeout=timeout)
        if done.exit_code in _CODES:
            raise PathError(path, _CODES[done.exit_code])
        if not done.ok:
            code = next((name for sign, name in _SIGNS.items() if sign in done.text), "EIO")
            raise PathError(path, code, hint=done.text[-200:].strip())
        return done.stdout

    async def exists(self, path: str) -> bool:
        return await self._step('[ -e "$1" ] && echo yes; exit 0', path, again=True) == b"yes\n"

    async def stat(self, path: str) -> Stat:
        (found,) = _stats(await self._step(_STAT, path, again=True))
        return Stat(path=path, **found[1])

    async def list_dir(self, path: str) -> list[Stat]:
        found = _stats(await self._step(_LIST, path, again=True))
        return [
            Stat(path=posixpath.join(path, name), **fields) for name, fields in sorted(found, key=lambda one: one[0])
        ]

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        self._as_it_is(user)
        await self._step(_MKDIR, path, f"{mode:o}", again=True)

    async def remove(self, path: str) -> None:
        await self._step(_REMOVE, path)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        """What is in `source` goes into `path`, which is made if it is absent."""
        self._as_it_is(user)
        if not Path(source).is_dir():
            raise ConfigError(f"{source} is not a directory of this machine")
        carried = f"{ROOT}/x/{new_id('tar')}"
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(tars.pack, source, ".", (0, 0), archive)
            archive.seek(0)
            number = 0
            while part := archive.read(_PART):
                await self._put(f"{carried}.{number:04d}", part)
                number += 1
        await self._step(_UNPACK, path, carried, timeout=_TREE_S)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> None:
        """What is in the directory `path` goes into `target` on this machine, which is made if it is absent."""
        carried = f"{ROOT}/x/{new_id('tar')}"
        await self._step(_PACK, path, carried, timeout=_TREE_S)
        Path(target).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            archive.write(await self.read(carried, max_bytes=max_bytes + 2**26))
            await self.remove(carried)
            archive.seek(0)
            await asyncio.to_thread(tars.unpack, os.dup(archive.fileno()), target, max_bytes)


def _stats(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    words = raw.split(b"\0")[:-1]
    found: list[tuple[str, dict[str, Any]]] = []
    for at in range(0, len(words), 6):
        name, kind, size, mode, when, target = words[at : at + 6]
        named = cast(Literal["file", "dir", "symlink", "other"], _KINDS.get(kind.decode(), "other"))
        fields = {"kind": named, "size": int(size), "mode": int(mode, 8), "mtime": float(when)}
        told = target.decode("utf-8", "surrogateescape") if named == "symlink" else None
        found.append((name.decode("utf-8", "surrogateescape"), {**fields, "target": told}))
    return found
