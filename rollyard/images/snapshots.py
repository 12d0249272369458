"""Frozen states: copying an overlay's upper directory out of a live sandbox, and merging stacks of them.

The upper belongs to the sandbox, which may be changing it while it is read. So it is walked by directory handles without
following a link: a directory that turns into a link to somewhere else is left out, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollyard.core import folders
from rollyard.images.archives import OPAQUE, is_whiteout, make_whiteout

OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class _Copy:
    def __init__(self, uid_shift: int) -> None:
        self.shift = uid_shift
        self.owned = os.geteuid() == 0
        self.links: dict[tuple[int, int], Path] = {}
        self.bytes = 0


def copy_upper(upper: Path, target: Path, *, uid_shift: int = 0) -> int:
    """Copy with owners, modes, times, access lists, capabilities, hard links, whiteouts and opaque marks; sockets, pipes and
    devices stay behind. `uid_shift` is taken off every owner. Returns the bytes copied."""
    copy = _Copy(uid_shift)
    made: list[tuple[Path, os.stat_result]] = []
    attributes: dict[Path, dict[str, bytes]] = {}
    for folder in folders.walk(upper):
        place = target.joinpath(*folder.names)
        place.mkdir(exist_ok=not folder.names)
        made.append((place, os.fstat(folder.fd)))
        attributes[place] = _read_attributes(folder.fd, uid_shift)
        with contextlib.suppress(OSError):  # absent on most directories
            os.setxattr(place, OPAQUE, os.getxattr(folder.fd, OPAQUE))
        for name in folder.others:
            try:
                _copy_entry(folder.fd, name, place / name, copy)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                    raise  # those four: it went away or turned into something else while we looked
    for place, status in reversed(made):
        _copy_metadata(place, status, copy, attributes[place])
    return copy.bytes


def _copy_entry(handle: int, name: str, place: Path, copy: _Copy) -> None:
    status = os.stat(name, dir_fd=handle, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        place.symlink_to(os.readlink(name, dir_fd=handle))
        _copy_metadata(place, status, copy)
    elif is_whiteout(status):
        make_whiteout(place)
    elif stat.S_ISREG(status.st_mode):
        if status.st_nlink > 1 and (first := copy.links.get((status.st_dev, status.st_ino))):
            place.hardlink_to(first)
            return
        source = os.open(name, OPEN_FILE, dir_fd=handle)
        with os.fdopen(source, "rb") as reader, place.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            attributes = _read_attributes(reader.fileno(), copy.shift)
        copy.bytes += status.st_size
        copy.links[status.st_dev, status.st_ino] = place
        _copy_metadata(place, status, copy, attributes)


def _read_attributes(source: int | Path, shift: int) -> dict[str, bytes]:
    """Access lists, capabilities and attributes of the user's own; ids in them are lowered by `shift` as owners are."""
    found: dict[str, bytes] = {}
    try:
        for name in os.listxattr(source):
            if name in _LOWER_IDS:
                found[name] = _LOWER_IDS[name](os.getxattr(source, name), shift)
            elif name.startswith("user.") and not name.startswith("user.overlay."):
                found[name] = os.getxattr(source, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):  # gone meanwhile; a file system without any
            raise
    return found


def _lower_access_list(value: bytes, shift: int) -> bytes:
    lowered = bytearray(value)
    for at in range(4, len(value) - 7, 8):
        tag, permissions, number = struct.unpack_from("<HHI", value, at)
        if tag in (_ACL_USER, _ACL_GROUP):
            struct.pack_into("<HHI", lowered, at, tag, permissions, max(0, number - shift))
    return bytes(lowered)


def _lower_capabilities(value: bytes, shift: int) -> bytes:
    """Those that were given inside a user namespace name its root: the third form. Root's own are of the second."""
    form, *_ = struct.unpack_from("<I", value)
    if form & _FORM != _FORM_3 or len(value) < 24:
        return value
    root = max(0, struct.unpack_from("<I", value, 20)[0] - shift)
    if root:
        return value[:20] + struct.pack("<I", root)
    return struct.pack("<I", form & ~_FORM | _FORM_2) + value[4:20]


_ACL_USER, _ACL_GROUP = 0x02, 0x08
_FORM, _FORM_2, _FORM_3 = 0xFF000000, 0x02000000, 0x03000000
_LOWER_IDS = {
    "system.posix_acl_access": _lower_access_list,
    "system.posix_acl_default": _lower_access_list,
    "security.capability": _lower_capabilities,
}


def _copy_metadata(
    place: Path, status: os.stat_result, copy: _Copy, attributes: Mapping[str, bytes] | None = None
) -> None:
    """Owner first: a new one takes capabilities away. An access list comes after the mode that it is part of."""
    if copy.owned:
        uid, gid = max(0, status.st_uid - copy.shift), max(0, status.st_gid - copy.shift)
        os.chown(place, uid, gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        place.chmod(stat.S_IMODE(status.st_mode))
    for name, value in (attributes or {}).items():
        try:
            os.setxattr(place, name, value)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM):
                # The store's file system has none; only root may give some
                raise
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def merge(stack: Sequence[Path], target: Path, *, bottom: bool) -> None:
    """One tree that shows what `stack` (topmost first) shows. Files are shared by hard links. With `bottom` nothing lies
    below it, so marks of removal are dropped; otherwise they are kept for what is."""
    target.mkdir(exist_ok=True)
    for layer in reversed(stack):
        _lay(layer, target, bottom)


def _lay(layer: Path, target: Path, bottom: bool) -> None:
    todo, made = [(layer, target)], list[tuple[Path, Path]]()
    while todo:
        folder, place = todo.pop()
        made.append((folder, place))
        for entry in os.scandir(folder):
            _lay_entry(Path(entry.path), place / entry.name, bottom, todo)
    for folder, place in reversed(made):
        _copy_metadata(place, folder.stat(), _Copy(0), _read_attributes(folder, 0))


def _lay_entry(source: Path, place: Path, bottom: bool, todo: list[tuple[Path, Path]]) -> None:
    status = source.lstat()
    if is_whiteout(status):
        _clear(place)
        if not bottom:
            make_whiteout(place)
    elif stat.S_ISDIR(status.st_mode):
        opaque = is_opaque(source)
        if opaque or place.is_symlink() or not place.is_dir():
            hidden = os.path.lexists(place)  # a file or a mark of removal there hides what lies deeper
            _clear(place)
            place.mkdir()
            if (opaque or hidden) and not bottom:
                os.setxattr(place, OPAQUE, b"y")
        todo.append((source, place))
    else:
        _clear(place)
        _link_or_copy(source, place)


def is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False


def _clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        folders.remove(place)
    else:
        place.unlink(missing_ok=True)


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copy2(source, place, follow_symlinks=False)
        if os.geteuid() == 0:
            status = source.lstat()
            os.chown(place, status.st_uid, status.st_gid, follow_symlinks=False)
