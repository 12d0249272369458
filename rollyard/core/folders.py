"""Walks over directories that another program has filled: look at everything below one, or remove it.

A program in a sandbox may leave a thousand directories inside each other, names that make a path longer than the kernel
takes, links to anywhere, and directories closed to their owner. So a walk here is a loop and not a recursion, goes by
directory descriptors and never by long paths, follows no link, and has few descriptors open however deep it is: up leads
`..`, compared with what was there on the way down.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # it went away, or turned into something else, while we looked


class Folder:
    """One directory of a walk. What is no directory is in `others`, links to directories too. `fd` and `names`, which lead
    here from where the walk began, hold until the walk goes on; `folders` may be cut down before that."""

    def __init__(self, fd: int, names: list[str]) -> None:
        self.fd, self.names = fd, names
        self.place = _place(fd)
        self.folders: list[str] = []
        self.others: list[str] = []
        with os.scandir(fd) as entries:
            for entry in sorted(entries, key=lambda found: found.name):
                (self.folders if entry.is_dir(follow_symlinks=False) else self.others).append(entry.name)
        self._left: Iterator[str] | None = None

    @property
    def path(self) -> str:
        return "/".join(self.names)

    def next_folder(self) -> str | None:
        if self._left is None:
            self._left = iter(self.folders)
        return next(self._left, None)


def _place(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class _Walk:
    def __init__(self, path: str | os.PathLike[str], open_dir: Callable[[str, int | None], int]) -> None:
        self._open = open_dir
        self._root = open_dir(os.fspath(path), None)
        self._names: list[str] = []
        self._above: list[Folder] = []
        self.here = Folder(os.dup(self._root), self._names)

    def down(self, name: str) -> None:
        fd = self._open(name, self.here.fd)
        try:
            folder = Folder(fd, self._names)
        except BaseException:  # however it ends, the descriptor is closed
            os.close(fd)
            raise
        os.close(self.here.fd)
        self._above.append(self.here)
        self._names.append(name)
        self.here = folder

    def up(self) -> str | None:
        """To the parent; returns the name of what was left, or None where the walk began."""
        while self._above:
            name, parent = self._names.pop(), self._above.pop()
            try:
                fd = self._parent(parent)
            except FileNotFoundError:  # another process has removed that one too
                continue
            os.close(self.here.fd)
            parent.fd, self.here = fd, parent
            return name
        return None

    def _parent(self, folder: Folder) -> int:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            fd = os.open("..", _DIR, dir_fd=self.here.fd)
            if _place(fd) == folder.place:
                return fd
            os.close(fd)
        fd = os.dup(self._root)  # it was moved, or an overlay has given it another number: by the names, then
        for name in self._names:
            try:
                child = os.open(name, _DIR, dir_fd=fd)
            finally:
                os.close(fd)
            fd = child
        return fd

    def close(self) -> None:
        os.close(self.here.fd)
        os.close(self._root)


def walk(path: str | os.PathLike[str], on_error: Callable[[OSError], object] | None = None) -> Iterator[Folder]:
    """`path` and every directory below it, parents first, in one order on every machine. What goes away meanwhile is left
    out; a directory that cannot be opened is given to `on_error`, or ends the walk."""
    going = _Walk(path, _open)
    try:
        yield going.here
        while True:
            name = going.here.next_folder()
            if name is None:
                if going.up() is None:
                    return
                continue
            try:
                going.down(name)
            except OSError as error:
                if error.errno not in _CHANGED:
                    if on_error is None:
                        raise
                    on_error(error)
                continue
            yield going.here
    finally:
        going.close()


def entries(path: str | os.PathLike[str]) -> Iterator[str]:
    """The paths of everything below `path`, relative to it, each directory before what is in it."""
    for folder in walk(path):
        prefix = f"{folder.path}/" if folder.names else ""
        yield from sorted(prefix + name for name in (*folder.folders, *folder.others))


def remove(path: str | os.PathLike[str]) -> None:
    """`rm -rf`, for directories closed to their owner too. A missing path is fine. What cannot be removed is stepped over,
    and the first reason is raised at the end."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108 - also run where few modules are loaded
            return
        going = _Walk(path, _open_closed)
    except FileNotFoundError:
        return
    kept: list[OSError] = []
    try:
        _unlink(going.here, kept)
        while True:
            if (name := going.here.next_folder()) is not None:
                with _keep_first_error(kept):
                    going.down(name)
                    _unlink(going.here, kept)
            elif (name := going.up()) is not None:
                with _keep_first_error(kept):
                    os.rmdir(name, dir_fd=going.here.fd)
            else:
                break
    finally:
        going.close()
    if kept:
        raise kept[0]
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)  # noqa: PTH106 - as above


def _unlink(folder: Folder, kept: list[OSError]) -> None:
    for name in folder.others:
        with _keep_first_error(kept):
            os.unlink(name, dir_fd=folder.fd)


@contextlib.contextmanager
def _keep_first_error(kept: list[OSError]) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        pass  # another process removes it too
    except OSError as error:
        kept[:] = kept or [error]


def _open(name: str, at: int | None) -> int:
    return os.open(name, _DIR if at is not None else _DIR & ~os.O_NOFOLLOW, dir_fd=at)


def _open_closed(name: str, at: int | None) -> int:
    try:
        fd = os.open(name, _DIR, dir_fd=at)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=at)
        fd = os.open(name, _DIR, dir_fd=at)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o700 != 0o700:
        with contextlib.suppress(PermissionError):  # it belongs to another user; it may be empty
            os.fchmod(fd, mode | 0o700)
    return fd
