"""Whole directories: remove one, send one through a pipe, receive one.

Both ends walk by directory descriptors and never follow a symlink, so neither a hostile tree nor one that changes under
the walk leads outside. The stream is a header per entry (length, JSON), then a file's bytes; a file that shrinks while it
is read is padded, so the stream never loses step. Sockets, pipes and devices are left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 2**18


def remove(path: str) -> None:
    """`rm -rf`, for trees with unreadable directories too. A missing path is fine."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        fd = _open_dir(path)
    except FileNotFoundError:
        return
    try:
        _empty(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _open_dir(name: str, at: int | None = None) -> int:
    try:
        return os.open(name, _DIR, dir_fd=at)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=at)
        return os.open(name, _DIR, dir_fd=at)


def _empty(fd: int) -> None:
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o700 != 0o700:
        os.fchmod(fd, mode | 0o700)
    with os.scandir(fd) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_dir in names:
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
            if not is_dir:
                os.unlink(name, dir_fd=fd)
                continue
            child = _open_dir(name, fd)
            try:
                _empty(child)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=fd)


def usage(path: str) -> int:
    """Bytes allocated below `path`; what disappears while it is counted is not counted."""
    total = 0
    try:
        for _root, _dirs, files, fd in os.fwalk(path, follow_symlinks=False, onerror=None):
            for name in files:
                try:
                    total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
                except OSError:
                    continue
    except OSError:
        return total
    return total


def pack(path: str, out: BinaryIO, *, max_bytes: int | None = None) -> None:
    """Write the directory at `path` to `out`. More than `max_bytes` of file content is EFBIG."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    left = [max_bytes if max_bytes is not None else 2**62]
    try:
        _pack_dir(fd, "", out, left)
    finally:
        os.close(fd)
    out.write(struct.pack(">I", 0))
    out.flush()


def _header(out: BinaryIO, **fields: Any) -> None:
    raw = json.dumps(fields).encode()
    out.write(struct.pack(">I", len(raw)) + raw)


def _pack_dir(fd: int, prefix: str, out: BinaryIO, left: list[int]) -> None:
    with os.scandir(fd) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = prefix + name
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                _header(out, path=path, kind="symlink", target=os.readlink(name, dir_fd=fd))
            elif stat.S_ISDIR(info.st_mode):
                child = os.open(name, _DIR, dir_fd=fd)
                try:
                    _header(out, path=path, kind="dir", mode=stat.S_IMODE(info.st_mode))
                    _pack_dir(child, path + "/", out, left)
                finally:
                    os.close(child)
            elif stat.S_ISREG(info.st_mode):
                _pack_file(fd, name, path, out, left)
        except FileNotFoundError:
            continue  # it went away between the listing and the look


def _pack_file(at: int, name: str, path: str, out: BinaryIO, left: list[int]) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return
        left[0] -= info.st_size
        if left[0] < 0:
            raise OSError(errno.EFBIG, "the directory is larger than allowed", path)
        _header(out, path=path, kind="file", mode=stat.S_IMODE(info.st_mode), size=info.st_size)
        size = info.st_size
        while size:
            part = os.read(fd, min(size, _CHUNK)) or bytes(min(size, _CHUNK))
            out.write(part)
            size -= len(part)
    finally:
        os.close(fd)


def _headers(source: BinaryIO) -> Iterator[dict[str, Any]]:
    while True:
        size = struct.unpack(">I", _exactly(source, 4))[0]
        if size == 0:
            return
        if size > 2**20:
            raise OSError(errno.EPROTO, "not a directory stream")
        yield json.loads(_exactly(source, size))


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise OSError(errno.EPIPE, "the directory stream ended early")
    return data


def unpack(source: BinaryIO, path: str, *, owner: tuple[int, int] | None = None, max_bytes: int | None = None) -> None:
    """Write a stream below the existing directory `path`. What is in the way of a file is replaced, never followed."""
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    modes: list[tuple[str, int]] = []
    left = max_bytes if max_bytes is not None else 2**62
    try:
        for entry in _headers(source):
            *parents, name = entry["path"].split("/")
            if not all(part not in ("", ".", "..") for part in (*parents, name)):
                raise OSError(errno.EPROTO, "a name in the stream leads elsewhere", entry["path"])
            left -= entry.get("size", 0)
            if left < 0:
                raise OSError(errno.EFBIG, "the directory is larger than allowed", entry["path"])
            with _Parent(root, parents) as at:
                _place(at, name, entry, source, owner)
            if entry["kind"] == "dir":
                modes.append((entry["path"], entry["mode"]))
        for dir_path, mode in reversed(modes):
            *parents, name = dir_path.split("/")
            with _Parent(root, parents) as at:
                fd = os.open(name, _DIR, dir_fd=at)
                os.fchmod(fd, mode)
                os.close(fd)
    finally:
        os.close(root)


class _Parent:
    """The directory reached from `root` by `parts` without following a link."""

    def __init__(self, root: int, parts: list[str]) -> None:
        self._fd = os.dup(root)
        for part in parts:
            try:
                child = os.open(part, _DIR, dir_fd=self._fd)
            except BaseException:  # however it ends, the descriptor is closed
                os.close(self._fd)
                raise
            os.close(self._fd)
            self._fd = child

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)


def _place(at: int, name: str, entry: dict[str, Any], source: BinaryIO, owner: tuple[int, int] | None) -> None:
    kind = entry["kind"]
    if kind == "dir":
        try:
            os.mkdir(name, 0o700, dir_fd=at)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=at)
                os.mkdir(name, 0o700, dir_fd=at)
    else:
        try:
            os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            pass
        if kind == "symlink":
            os.symlink(entry["target"], name, dir_fd=at)
        else:
            _write_file(at, name, entry, source)
    if owner is not None:
        os.chown(name, *owner, dir_fd=at, follow_symlinks=False)


def _write_file(at: int, name: str, entry: dict[str, Any], source: BinaryIO) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        size = entry["size"]
        while size:
            data = memoryview(_exactly(source, min(size, _CHUNK)))
            size -= len(data)
            while data:
                data = data[os.write(fd, data) :]
        os.fchmod(fd, entry["mode"] & 0o7777)
    finally:
        os.close(fd)
