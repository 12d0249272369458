"""Directory trees as values: list and hash one, copy one by hard links, give one its name in a single step.

A tree gets its final name only by `rename`, so half of it is never visible, and a build that dies leaves only a directory
whose name starts with a dot.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollyard.core import folders

PLACEHOLDER = b"@PREFIX@"


class ManifestEntry(msgspec.Struct, frozen=True):
    """One line of a manifest. `digest` is of a file's bytes with the prefix it was built under taken out, or of a link's
    target; `mentions` says that the prefix occurs in it."""

    path: str
    mode: int
    digest: str
    size: int
    mentions: bool = False
    binary: bool = False


def walk(root: Path) -> Iterator[Path]:
    """Everything below `root`, parents first, in one order on every machine."""
    left = [iter(sorted(os.listdir(root)))]
    at = root
    while left:
        name = next(left[-1], None)
        if name is None:
            left.pop()
            at = at.parent
            continue
        path = at / name
        yield path
        if path.is_dir() and not path.is_symlink():
            left.append(iter(sorted(os.listdir(path))))
            at = path


def manifest(root: Path, built_under: bytes | None = None) -> list[ManifestEntry]:
    """Every entry with its mode and digest. Owners and times do not count: they differ between machines and users."""
    entries: list[ManifestEntry] = []
    for path in walk(root):
        status = path.lstat()
        name = str(path.relative_to(root))
        if stat.S_ISLNK(status.st_mode):
            entries.append(
                ManifestEntry(name, stat.S_IFLNK, hashlib.sha256(os.fsencode(path.readlink())).hexdigest(), 0)
            )
        elif stat.S_ISREG(status.st_mode):
            entries.append(_file_entry(path, name, status, built_under))
        elif stat.S_ISDIR(status.st_mode):
            entries.append(ManifestEntry(name, stat.S_IFDIR | stat.S_IMODE(status.st_mode), "", 0))
        else:
            entries.append(ManifestEntry(name, stat.S_IFMT(status.st_mode), f"{status.st_rdev}", 0))
    return entries


def _file_entry(path: Path, name: str, status: os.stat_result, built_under: bytes | None) -> ManifestEntry:
    mode = stat.S_IFREG | stat.S_IMODE(status.st_mode)
    if built_under is None:
        with path.open("rb") as stream:
            return ManifestEntry(name, mode, hashlib.file_digest(stream, "sha256").hexdigest(), status.st_size)
    content = path.read_bytes()
    mentions = built_under in content
    if mentions:
        content = content.replace(built_under, PLACEHOLDER)
    digest = hashlib.sha256(content).hexdigest()
    return ManifestEntry(name, mode, digest, status.st_size, mentions, binary=b"\0" in content)


def tree_digest(entries: list[ManifestEntry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.mode:o} {entry.digest} {entry.path}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def open_to_all(root: Path) -> None:
    """Readable by any uid, writable by the owner alone, no setuid: what a layer's files must be."""
    root.chmod(0o755)
    for path in walk(root):
        if path.is_symlink():
            continue
        mode = path.stat().st_mode
        wanted = 0o755 if stat.S_ISDIR(mode) or mode & 0o111 else 0o644
        if stat.S_IMODE(mode) != wanted:
            path.chmod(wanted)


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares its files with `source` where the file system can; both are never written to again."""
    target.mkdir(exist_ok=True)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:  # two toolchains carry the same library of this machine
        return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def publish(built: Path, final: Path) -> Path:
    """Give `built` its name. If another process was first, its tree is kept and ours is removed."""
    try:
        built.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove_tree(built)
    return final


def remove_tree(path: Path) -> None:
    """`rm -rf` that also gets past read-only directories; what is already gone is no error. A second time where another process
    wrote into it meanwhile."""
    with contextlib.suppress(OSError):
        folders.remove(path)
    folders.remove(path)
