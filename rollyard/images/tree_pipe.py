"""Whole directories: count one, send one through a pipe, receive one.

Both ends walk by directory descriptors and never follow a symlink, so neither a hostile tree nor one that changes under
the walk leads outside. The stream is a header per entry (length, JSON), then a file's bytes; a file that shrinks while it
is read is padded, so the stream never loses step. Sockets, pipes and devices are left out, and so is what lies so deep that
no path can name it where the stream is unpacked; a header says how many entries that were.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from rollyard.core import folders

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 2**18
LONGEST = 3500  # bytes of a path in a stream; the kernel takes 4096, with the place it is unpacked to
NAME = 255  # bytes of one name
LEFT_OUT = "left_out"  # a header that stands for what is not in the stream
_SMALL_ENTRIES, _SMALL_BYTES = 128, 2**17  # moved at once: a process for it would cost more than the moving


class DiskUse(NamedTuple):
    bytes: int
    inodes: int


def usage(path: str) -> DiskUse:
    """Bytes allocated and inodes below `path`; what disappears while it is counted is not counted."""
    total = inodes = 0
    with contextlib.suppress(OSError):  # gone
        for folder in folders.walk(path, on_error=lambda _error: None):
            total += os.fstat(folder.fd).st_blocks * 512
            inodes += 1 + len(folder.others)
            for name in folder.others:
                with contextlib.suppress(OSError):
                    total += os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_blocks * 512
    return DiskUse(total, inodes)


def is_small(path: str) -> bool:
    """Whether so little is below `path` that nothing waits while it is read or removed. Looks no further than it has to."""
    entries, size, waiting = 0, 0, [path]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    size += entry.stat(follow_symlinks=False).st_size
                if entries > _SMALL_ENTRIES or size > _SMALL_BYTES:
                    return False
    return True


def pack_small(path: str, *, max_bytes: int | None = None, link: Callable[[str], str] = str) -> bytes | None:
    """The stream of a small directory; None for one that is not small, or that cannot be read like this."""
    out = io.BytesIO()
    try:
        if not is_small(path):
            return None
        pack(path, out, max_bytes=min(2 * _SMALL_BYTES, max_bytes if max_bytes is not None else 2**62), link=link)
    except OSError:  # the long way says what it is
        return None
    return out.getvalue()


def pack(path: str, out: BinaryIO, *, max_bytes: int | None = None, link: Callable[[str], str] = str) -> None:
    """Write the directory at `path` to `out`. More than `max_bytes` of file content is EFBIG. `link` says how a link's target is
    written."""
    left = [max_bytes if max_bytes is not None else 2**62]
    for folder in folders.walk(path):
        prefix = f"{folder.path}/" if folder.names else ""
        if folder.folders and len(os.fsencode(prefix)) > LONGEST - NAME:
            _header(out, kind=LEFT_OUT, number=len(folder.folders))
            folder.folders.clear()
        if prefix:
            _header(out, path=folder.path, kind="dir", mode=stat.S_IMODE(os.fstat(folder.fd).st_mode))
        for name in folder.others:
            with contextlib.suppress(FileNotFoundError):  # it went away between the listing and the look
                _pack_other(folder.fd, name, prefix + name, out, left, link)
    out.write(struct.pack(">I", 0))
    out.flush()


def _header(out: BinaryIO, **fields: Any) -> None:
    raw = json.dumps(fields).encode()
    out.write(struct.pack(">I", len(raw)) + raw)


def _pack_other(at: int, name: str, path: str, out: BinaryIO, left: list[int], link: Callable[[str], str]) -> None:
    mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        _header(out, path=path, kind="symlink", target=link(os.readlink(name, dir_fd=at)))
    elif stat.S_ISREG(mode):
        _pack_file(at, name, path, out, left)


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
        size = struct.unpack(">I", _read_exactly(source, 4))[0]
        if size == 0:
            return
        if size > 2**20:
            raise OSError(errno.EPROTO, "not a directory stream")
        yield json.loads(_read_exactly(source, size))


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise OSError(errno.EPIPE, "the directory stream ended early")
    return data


def unpack(
    source: BinaryIO,
    path: str,
    *,
    owner: tuple[int, int] | None = None,
    max_bytes: int | None = None,
    link: Callable[[str], str] = str,
) -> int:
    """Write a stream below the existing directory `path`. What is in the way of a file is replaced, never followed. Gives how
    many entries were left out of the stream. `link` says where a link of the stream leads."""
    at = _Parents(path)
    left_out = 0
    closed: list[tuple[str, int]] = []
    left = max_bytes if max_bytes is not None else 2**62
    try:
        for entry in _headers(source):
            if entry["kind"] == LEFT_OUT:
                left_out += entry["number"]
                continue
            *parents, name = entry["path"].split("/")
            if not all(part not in ("", ".", "..") for part in (*parents, name)):
                raise OSError(errno.EPROTO, "a name in the stream leads elsewhere", entry["path"])
            left -= entry.get("size", 0)
            if left < 0:
                raise OSError(errno.EFBIG, "the directory is larger than allowed", entry["path"])
            if entry["kind"] == "symlink":
                entry["target"] = link(entry["target"])
            _place(at.open(parents), name, entry, source, owner)
            if entry["kind"] == "dir":
                if entry["mode"] & 0o700 == 0o700:
                    at.set_mode(parents, name, entry["mode"])
                else:
                    closed.append((entry["path"], entry["mode"]))
        for dir_path, mode in reversed(closed):
            *parents, name = dir_path.split("/")
            at.set_mode(parents, name, mode)
    finally:
        at.close()
    return left_out


class _Parents:
    """Directories below `path`, reached without following a link. The last is kept: what comes next is mostly in it."""

    def __init__(self, path: str) -> None:
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._names: list[str] = []
        self._fd = os.dup(self._root)

    def open(self, names: list[str]) -> int:
        known = len(self._names)
        if names[:known] != self._names:
            os.close(self._fd)
            self._fd, self._names, known = os.dup(self._root), [], 0
        for name in names[known:]:
            child = os.open(name, _DIR, dir_fd=self._fd)
            os.close(self._fd)
            self._fd = child
            self._names.append(name)
        return self._fd

    def set_mode(self, parents: list[str], name: str, mode: int) -> None:
        fd = os.open(name, _DIR, dir_fd=self.open(parents))
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._root)


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
            data = memoryview(_read_exactly(source, min(size, _CHUNK)))
            size -= len(data)
            while data:
                data = data[os.write(fd, data) :]
        os.fchmod(fd, entry["mode"] & 0o7777)
    finally:
        os.close(fd)
