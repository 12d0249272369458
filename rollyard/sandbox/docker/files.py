"""Files of a container through the engine's archives: no program is started for a read or a write.

The engine opens paths inside the container's own root, so a planted link leads nowhere else; what comes out is unpacked here
without following anything. Special file systems (/proc, /sys, /dev) are not in archives and are read by a program.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import io
import json
import os
import posixpath
import stat as modes
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from rollyard.core.errors import ConfigError, PathError, SandboxError, SandboxGone
from rollyard.core.sandbox import Stat
from rollyard.images import tars
from rollyard.sandbox.docker.engine import EngineRefused
from rollyard.sandbox.docker.faults import translate_faults
from rollyard.sandbox.docker.programs import DockerPrograms
from rollyard.sandbox.retry import LOOKS, retry_open

_VIRTUAL = ("/proc/", "/sys/", "/dev/")
_TAR = {"Content-Type": "application/x-tar"}
_LIST = """cd -- "$1" 2>/dev/null || { [ -e "$1" ] && exit 20; exit 2; }
set -- * .[!.]* ..?*
for f do shift; { [ -e "$f" ] || [ -L "$f" ]; } && set -- "$@" "$f"; done
[ $# -eq 0 ] && exit 0
printf '%s\\0' "$@"; printf '\\0'
printf '%s\\0' "$@" | xargs -0 stat -c '%f %s %Y' --
for f do [ -L "$f" ] && readlink -n -- "$f" && printf '\\0'; done; exit 0
"""
_STAT = '[ -e "$1" ] || [ -L "$1" ] || exit 2; stat -c "%f %s %Y" -- "$1"; [ -L "$1" ] && readlink -f -- "$1"; exit 0'
_REMOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 2; rm -rf -- "$1"'
_GO_BITS = {1 << 23: modes.S_ISUID, 1 << 22: modes.S_ISGID, 1 << 20: modes.S_ISVTX}
_GO_KINDS = ((modes.S_ISDIR, 1 << 31), (modes.S_ISLNK, 1 << 27), (modes.S_ISFIFO, 1 << 25), (modes.S_ISSOCK, 1 << 24))
Kind = Literal["file", "dir", "symlink", "other"]


class DockerFiles(DockerPrograms):
    """The file half of a sandbox."""

    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise PathError(path, "EINVAL", hint="a path is not empty and has no NUL")
        return posixpath.normpath(posixpath.join(self._who.workdir, path)).replace("//", "/")

    async def is_paused(self) -> bool:
        with translate_faults(self.id):
            found = await self._engine.call("GET", f"containers/{self._container}/json")
        return bool(found["State"].get("Paused"))

    def _pattern(self, path: str) -> bool:
        """Podman's archives take a path for a pattern and know no way to quote one."""
        return self._engine.podman and any(sign in path for sign in "*?[\\")

    async def _lstat(self, path: str) -> dict[str, Any] | None:
        """What the engine says about a path, its last link not followed; None when it is not there."""
        if self._pattern(path):
            return await self._lstat_inside(path)
        try:
            async with self._engine.request(
                "HEAD", f"containers/{self._container}/archive", params={"path": path}
            ) as said:
                return _decode_stat(said.headers)
        except EngineRefused as refused:
            if refused.status == 404:
                if not await self.alive():
                    raise SandboxGone(f"sandbox {self.id} is gone", hint="open another sandbox") from None
                return None
            with translate_faults(self.id, path):
                raise

    async def _lstat_inside(self, path: str) -> dict[str, Any] | None:
        """The same by a program in the sandbox."""
        done = await self.script(_STAT, path)
        if done.exit_code == 2:
            return None
        line, _, target = done.stdout.partition(b"\n")
        mode, size, when = line.split()
        bits = int(mode, 16)
        kind = sum(flag for test, flag in _GO_KINDS if test(bits))
        stamp = datetime.fromtimestamp(int(when), UTC).isoformat()
        return {"mode": kind | bits & 0o777, "size": int(size), "mtime": stamp, "linkTarget": target.decode().strip()}

    async def _final(self, path: str) -> tuple[str, dict[str, Any] | None]:
        """Where a path ends once its links are followed inside, and what is there."""
        found = await self._lstat(path)
        if found is not None and _kind(found) == "symlink" and found.get("linkTarget"):
            target = posixpath.join(posixpath.dirname(path), found["linkTarget"])
            return target, await self._lstat(target)
        return path, found

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        return await retry_open(lambda: self._read_whole(path, max_bytes), LOOKS, idempotent=True)

    async def _read_whole(self, path: str, max_bytes: int) -> bytes:
        whole = self._path(path)
        if whole.startswith(_VIRTUAL) or self._pattern(whole):
            return await self._read_virtual(path, whole, max_bytes)
        place, found = await self._final(whole)
        if found is None:
            raise PathError(path, "ENOENT", hint="it does not exist in the sandbox")
        if _kind(found) != "file":
            raise PathError(path, "EISDIR" if _kind(found) == "dir" else "EACCES", hint="it is not a regular file")
        if found["size"] > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        raw = bytearray()
        async for chunk in self._archive(place):
            raw += chunk
            if len(raw) > max_bytes + 2**20:  # it grew while it was read
                raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            source = archive.extractfile(next(iter(archive)))
            return source.read() if source is not None else b""

    async def _read_virtual(self, path: str, whole: str, max_bytes: int) -> bytes:
        done = await self.exec_plain(["head", "-c", str(max_bytes + 1), "--", whole], timeout=60)
        if not done.ok:
            raise PathError(path, "ENOENT", hint=done.text[-200:].strip())
        if len(done.stdout) > max_bytes:
            raise PathError(path, "EFBIG", hint=f"it is larger than max_bytes={max_bytes}")
        return done.stdout

    async def _archive(self, path: str) -> AsyncIterator[bytes]:
        with translate_faults(self.id, path):
            async with self._engine.request(
                "GET",
                f"containers/{self._container}/archive",
                params={"path": path},
                timeout=tars.TREE_S,
            ) as said:
                async for chunk in said.content.iter_chunked(tars.CHUNK):
                    yield chunk

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        return (await self.read(path, max_bytes=max_bytes)).decode()

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Makes missing parents. A file that is there keeps its mode when none is given."""
        place, found = await self._final(self._path(path))
        if found is not None and _kind(found) == "dir":
            raise PathError(path, "EISDIR", hint="it is a directory")
        raw = data.encode() if isinstance(data, str) else data
        member = tarfile.TarInfo(place.lstrip("/"))
        member.size, member.mtime = len(raw), int(time.time())
        member.mode = mode if mode is not None else (_mode(found) if found is not None else 0o644)
        member.uid, member.gid = await self._ids(user)
        await retry_open(lambda: self._put(path, tars.single(member, raw)), LOOKS, idempotent=True)

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        place, found = await self._final(self._path(path))
        if found is not None:
            if _kind(found) != "dir":
                raise PathError(path, "EEXIST", hint="it exists and is not a directory")
            return
        member = tarfile.TarInfo(place.lstrip("/"))
        member.type, member.mode, member.mtime = tarfile.DIRTYPE, mode, int(time.time())
        member.uid, member.gid = await self._ids(user)
        await retry_open(lambda: self._put(path, tars.single(member)), LOOKS, idempotent=True)

    async def _put(self, path: str, data: AsyncIterator[bytes]) -> None:
        """Unpack a tar at the root. The owners are those in the tar."""
        params = {"path": "/", "copyUIDGID": "false", "noOverwriteDirNonDir": "false"}
        with translate_faults(self.id, path):
            async with self._engine.request(
                "PUT",
                f"containers/{self._container}/archive",
                params=params,
                data=data,
                headers=_TAR,
                timeout=tars.TREE_S,
            ):
                pass

    async def _ids(self, user: str | None) -> tuple[int, int]:
        """Numbers of a user by the container's own list."""
        name, _, group = (user or self._who.user).partition(":")
        if name in ("0", "root"):
            return 0, int(group) if group.isdigit() else 0
        lines = (await self.read_text("/etc/passwd")).splitlines()
        known = [line.split(":") for line in lines if line.count(":") >= 3]
        entry = next((fields for fields in known if name in (fields[0], fields[2])), None)
        if entry is None and not name.isdigit():
            raise SandboxError(f"there is no user {name!r} in sandbox {self.id}")
        number = int(entry[2]) if entry else int(name)
        return number, int(group) if group.isdigit() else (int(entry[3]) if entry else number)

    async def exists(self, path: str) -> bool:
        _, found = await self._final(self._path(path))
        return found is not None

    async def stat(self, path: str) -> Stat:
        found = await self._lstat(self._path(path))
        if found is None:
            raise PathError(path, "ENOENT", hint="it does not exist in the sandbox")
        kind = _kind(found)
        target = await self._target(self._path(path)) if kind == "symlink" else None
        when = datetime.fromisoformat(found["mtime"].replace("Z", "+00:00")[:19] + "+00:00").timestamp()
        return Stat(path=path, kind=kind, size=found["size"], mode=_mode(found), mtime=when, target=target)

    async def _target(self, path: str) -> str:
        raw = b"".join([chunk async for chunk in self._archive(path)])
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            return next(iter(archive)).linkname

    async def list_dir(self, path: str) -> list[Stat]:
        whole = self._path(path)
        done = await self.script(_LIST, whole)
        if done.exit_code:
            raise PathError(path, {2: "ENOENT", 20: "ENOTDIR"}.get(done.exit_code, "EIO"))
        if not done.stdout:
            return []
        head, _, rest = done.stdout.partition(b"\0\0")
        names = [name.decode("utf-8", "surrogateescape") for name in head.split(b"\0")]
        lines = rest.split(b"\n", len(names))
        targets = iter(lines[len(names)].split(b"\0"))
        return [
            _parse_entry(f"{whole.rstrip('/')}/{name}", line, targets) for name, line in zip(names, lines, strict=False)
        ]

    async def remove(self, path: str) -> None:
        done = await self.script(_REMOVE, self._path(path), timeout=120.0)
        if done.exit_code == 2:
            raise PathError(path, "ENOENT", hint="it does not exist in the sandbox")
        if not done.ok:
            raise PathError(path, "EIO", hint=done.text[-200:].strip())

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        """What is in `source` on the host goes into the directory `path`, over what is there."""
        if not Path(source).is_dir():
            raise ConfigError(f"upload_dir: {source!r} is not a directory on this host")
        owner = await self._ids(user)
        await self.mkdir(path, user=user)
        place, _ = await self._final(self._path(path))
        async with tars.pipe_chunks(lambda out: tars.pack(source, place.lstrip("/"), owner, out)) as chunks:
            await self._put(path, chunks)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> int:
        """What is in the directory `path` goes into `target` on the host, which is made if it is absent."""
        place, found = await self._final(self._path(path))
        if found is None or _kind(found) != "dir":
            raise PathError(path, "ENOENT" if found is None else "ENOTDIR")
        Path(target).mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        taking = asyncio.get_running_loop().run_in_executor(None, tars.unpack, read, target, max_bytes)
        try:
            async for chunk in self._archive(place):
                await asyncio.to_thread(tars.write_all, write, chunk)
        except BrokenPipeError:
            pass  # the other end has stopped; its error is the one to tell
        finally:
            os.close(write)
            with contextlib.suppress(Exception):  # the first error is the one that counts
                await asyncio.wait([taking], timeout=tars.TREE_S)
        try:
            return taking.result()
        except OSError as error:
            raise PathError(path, _errno(error)) from error


def _decode_stat(headers: Any) -> dict[str, Any]:
    """Docker writes it in the standard alphabet, Podman in the one for addresses."""
    text = headers["X-Docker-Container-Path-Stat"].replace("-", "+").replace("_", "/")
    return json.loads(base64.b64decode(text))


def _kind(found: dict[str, Any]) -> Kind:
    mode = int(found["mode"])
    if mode & (1 << 31):
        return "dir"
    if mode & (1 << 27):
        return "symlink"
    return "other" if mode & (1 << 26 | 1 << 25 | 1 << 24 | 1 << 21) else "file"


def _mode(found: dict[str, Any]) -> int:
    """Permission bits out of the engine's own way to write a mode."""
    mode = int(found["mode"])
    return (mode & 0o777) | sum(bit for theirs, bit in _GO_BITS.items() if mode & theirs)


def _parse_entry(path: str, line: bytes, targets: Iterator[bytes]) -> Stat:
    mode, size, when = line.split()
    bits = int(mode, 16)
    kind: Kind = "other"
    for test, name in ((modes.S_ISREG, "file"), (modes.S_ISDIR, "dir"), (modes.S_ISLNK, "symlink")):
        kind = cast(Kind, name) if test(bits) else kind
    target = next(targets).decode("utf-8", "surrogateescape") if kind == "symlink" else None
    return Stat(path=path, kind=kind, size=int(size), mode=modes.S_IMODE(bits), mtime=float(when), target=target)


def _errno(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EIO")
