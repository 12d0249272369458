"""File operations of the supervisor, done inside the sandbox's own root, so that no path can mean a host file.

What is opened is looked at before it is used: only regular files are handed to the host, never a device, a pipe that would
block, or a file of /proc (a planted link to `/proc/self/mem` would aim a host's write at the supervisor itself).

The supervisor is root, programs may be other users: a link of theirs must not make it change what they could not. So where
something is written, made or removed, links of root's are followed by root, and those of others with the rights of their owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from rollyard.sandbox.local.inner import syscalls
from rollyard.sandbox.local.inner.users import User

_HOPS = 40
MAX_LISTED = 50_000  # an answer is one message
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


def has_several_users() -> bool:
    """Whether programs can be users other than this process; with one id mapped all files are the same user's."""
    try:
        with open("/proc/self/uid_map") as file:
            return sum(int(line.split()[2]) for line in file) > 1
    except (OSError, ValueError, IndexError):
        return True


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
    names: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_LISTED:
                raise OSError(errno.EFBIG, f"more than {MAX_LISTED} names in one directory", path)
    for name in sorted(names):
        try:
            out.append(look(f"{base}/{name}"))
        except FileNotFoundError:
            continue  # it went away between the listing and the look
    return out


class UntrustedLink(OSError):
    """A link on the way that is not root's: what is behind it may only be changed with the rights of its owner."""

    def __init__(self, uid: int, gid: int, path: str) -> None:
        super().__init__(errno.ELOOP, "a link of another user", path)
        self.uid, self.gid = uid, gid


T = TypeVar("T")


def as_link_owner(act: Callable[[bool], T]) -> T:
    """`act(False)` as root; where a link of another user is on the way, `act(True)` with that user's rights and no more."""
    try:
        return act(False)
    except UntrustedLink as link:
        uid, gid = link.uid, link.gid
    syscalls.set_file_ids(uid, gid)
    try:
        return act(True)
    finally:
        syscalls.set_file_ids(os.geteuid(), os.getegid())


def open_parent(path: str, *, follow: bool, make: User | None = None, anyones: bool = False) -> tuple[int, str]:
    """The directory that holds `path`, as a descriptor, and the last name, which is no link when it was to be followed. Only
    links of root's are followed unless `anyones` are. Directories that the path itself names are made for `make`."""
    root, flags = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    here, waiting, hops = os.dup(root), [(part, make) for part in _parts(path)], 0
    try:
        while waiting:
            name, maker = waiting.pop()
            if not waiting and name != ".." and not (follow and _is_link(name, here)):
                return os.dup(here), name
            try:
                there = os.open(name, flags, dir_fd=here)
            except FileNotFoundError:
                if maker is None:
                    raise
                with contextlib.suppress(FileExistsError):  # another writer was first
                    _make_dir(name, here, 0o755, maker)
                there = os.open(name, flags, dir_fd=here)
            info = os.fstat(there)
            if stat.S_ISLNK(info.st_mode):
                target = _read_link(there, info, path, anyones)
                hops += 1
                if hops > _HOPS:
                    raise OSError(errno.ELOOP, "too many links", path)
                waiting += [(part, None) for part in _parts(target)]  # nothing that only a link names is made
                if target.startswith("/"):
                    os.close(here)
                    here = os.dup(root)
            elif stat.S_ISDIR(info.st_mode):
                os.close(here)
                here = there
            else:
                os.close(there)
                raise OSError(errno.ENOTDIR, "not a directory", path)
        return os.dup(here), "."
    finally:
        os.close(here)
        os.close(root)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _is_link(name: str, at: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _read_link(fd: int, info: os.stat_result, path: str, anyones: bool) -> str:
    try:
        if not anyones and info.st_uid not in (0, os.geteuid()) and has_several_users():
            raise UntrustedLink(info.st_uid, info.st_gid, path)
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def open_file(path: str, *, write: bool, mode: int | None, owner: User, proc_dev: int | None) -> int:
    if not write:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        return _check_regular(syscalls.openat2(path, flags, resolve=syscalls.RESOLVE_NO_MAGICLINKS), path, proc_dev)
    return as_link_owner(lambda anyones: _open_to_write(path, mode, owner, proc_dev, anyones))


def _open_to_write(path: str, mode: int | None, owner: User, proc_dev: int | None, anyones: bool) -> int:
    at, name = open_parent(path, follow=True, make=owner, anyones=anyones)
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(name, flags, dir_fd=at)
        except FileNotFoundError:
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=at)
            os.fchmod(fd, 0o644 if mode is None else mode)
            _give(fd, owner, anyones)
            return fd
    finally:
        os.close(at)
    _check_regular(fd, path, proc_dev)
    try:
        os.ftruncate(fd, 0)
        if mode is not None:
            os.fchmod(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(fd: int, path: str, proc_dev: int | None) -> int:
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_dev != proc_dev:
        return fd
    os.close(fd)
    if stat.S_ISDIR(info.st_mode):
        raise OSError(errno.EISDIR, "is a directory", path)
    raise OSError(errno.EACCES, "not a regular file", path)


def _give(fd: int, owner: User, anyones: bool) -> None:
    if (owner.uid or owner.gid) and not anyones:
        os.fchown(fd, owner.uid, owner.gid)


def make_dirs(path: str, mode: int, owner: User) -> None:
    """Missing parents too; those that exist keep their mode and owner."""
    as_link_owner(lambda anyones: _make_dirs(path, mode, owner, anyones))


def _make_dirs(path: str, mode: int, owner: User, anyones: bool) -> None:
    at, name = open_parent(path, follow=True, make=owner, anyones=anyones)
    try:
        try:
            _make_dir(name, at, mode, owner)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                raise OSError(errno.ENOTDIR, "not a directory", path) from None
    finally:
        os.close(at)


def _make_dir(name: str, at: int, mode: int, owner: User) -> None:
    os.mkdir(name, 0o700, dir_fd=at)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        os.fchmod(fd, mode)
        if owner.uid or owner.gid:
            with contextlib.suppress(PermissionError):  # with another user's rights it is that user's already
                os.fchown(fd, owner.uid, owner.gid)
    finally:
        os.close(fd)
