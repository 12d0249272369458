"""File operations of the supervisor, done inside the sandbox's own root, so that no path can mean a host file.

What is opened is looked at before it is used: only regular files are handed to the host, never a device, a pipe that would
block, or a file of /proc (a planted link to `/proc/self/mem` would aim a host's write at the supervisor itself).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from rollyard.sandbox.local.inner import syscalls
from rollyard.sandbox.local.inner.users import User

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


def describe(path: str, info: os.stat_result, target: str | None = None) -> dict[str, Any]:
    return {
        "path": path,
        "kind": _KINDS.get(stat.S_IFMT(info.st_mode), "other"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "mtime": info.st_mtime,
        "target": target,
    }


def look(path: str) -> dict[str, Any]:
    info = os.lstat(path)
    return describe(path, info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else None)


def listing(path: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    base = path.rstrip("/")
    for name in sorted(os.listdir(path)):
        try:
            out.append(look(f"{base}/{name}"))
        except FileNotFoundError:
            continue  # it went away between the listing and the look
    return out


def open_file(path: str, *, write: bool, mode: int | None, owner: User, proc_dev: int | None) -> int:
    if write:
        make_dirs(os.path.dirname(path) or "/", 0o755, owner)
    flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = syscalls.openat2(path, flags, resolve=syscalls.RESOLVE_NO_MAGICLINKS)
    except FileNotFoundError:
        if not write:
            raise
        return _create(path, mode, owner)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise OSError(errno.EISDIR, "is a directory", path)
        if not stat.S_ISREG(info.st_mode) or info.st_dev == proc_dev:
            raise OSError(errno.EACCES, "not a regular file", path)
        if write:
            os.ftruncate(fd, 0)
            if mode is not None:
                os.fchmod(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _create(path: str, mode: int | None, owner: User) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    fd = syscalls.openat2(path, flags, 0o644, resolve=syscalls.RESOLVE_NO_MAGICLINKS)
    os.fchmod(fd, 0o644 if mode is None else mode)
    if owner.uid or owner.gid:
        os.fchown(fd, owner.uid, owner.gid)
    return fd


def make_dirs(path: str, mode: int, owner: User) -> None:
    """Missing parents too; those that exist keep their mode and owner."""
    if os.path.isdir(path):
        return
    make_dirs(os.path.dirname(path.rstrip("/")) or "/", 0o755, owner)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise OSError(errno.ENOTDIR, "not a directory", path) from None
        return
    os.chmod(path, mode)
    if owner.uid or owner.gid:
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
