"""The directory that a sandbox without mount namespaces has for `/`: laid out as copies of its image's trees, with links to what
is shown from elsewhere; and what was changed in it since, as the upper directory that a snapshot is made of.

An image has to stand on `host`: programs of another system would find this machine's loader and libraries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core import folders
from rollyard.core.errors import Unsupported
from rollyard.core.sandbox import Mount
from rollyard.images.archives import clear, is_whiteout, make_whiteout
from rollyard.images.layers import layer_prefix
from rollyard.images.rootfs import Rootfs
from rollyard.images.snapshots import OPEN_FILE, is_opaque
from rollyard.sandbox.local.inner.path_view import PathView
from rollyard.sandbox.local.journal import Home

_RECORD = "view.json"


class ViewRecord(msgspec.Struct, frozen=True):
    """What was laid out. `files` say by inode and time of change whether a file is still the one that was put there; directories
    have neither."""

    root: str
    shown: dict[str, str]
    files: dict[str, tuple[int, int]]


def refuse(image: str, rootfs: Rootfs) -> None:
    """What only an overlay can show."""
    if not rootfs.trees:
        raise Unsupported(
            f"image {image!r} does not stand on 'host', which it has to where there are no mount namespaces",
            hint="`rollyard doctor` says what is missing; or use another backend",
        )
    for tree in rootfs.trees:
        if tree.over:
            raise Unsupported(
                f"image {image!r} changes {tree.target}, which is read-only where there are no mount namespaces",
                hint="put its files elsewhere (/opt, /app), or use another backend",
            )


def lay_out(home: Home, rootfs: Rootfs, mounts: Sequence[Mount]) -> dict[str, Any]:
    """Makes the root; gives what `inner/path_view.py` needs to show it."""
    root, shared = home.fs / "root", home.fs / "shm"
    root.mkdir(parents=True)
    root.chmod(0o755)
    shared.mkdir(mode=0o700)
    layers = [
        lower for lower in map(Path, rootfs.lowers) if lower.name == "root" and lower.parent.name.startswith("ly_")
    ]
    shown = {"/proc": "/proc", "/dev": "/dev", "/dev/shm": str(shared)}
    shown |= {tree.target: tree.source for tree in rootfs.trees}
    for lower in layers:
        prefix = layer_prefix(lower.parent.name)
        shown[prefix] = f"{lower}{prefix}"
    shown |= {mount.local_dir.rstrip("/"): str(Path(mount.remote_dir).resolve()) for mount in mounts}
    view = PathView(str(root), shown)
    for lower in reversed(rootfs.lowers):
        if Path(lower) not in layers:
            _lay(lower, root, view)
    for inside, outside in shown.items():
        _link(root, inside, outside)
    record = ViewRecord(root=str(root), shown=shown, files=dict(_list_files(root)))
    (home.path / _RECORD).write_bytes(msgspec.json.encode(record))
    return {"root": str(root), "shown": shown}


def _link(root: Path, inside: str, outside: str) -> None:
    """For those who come by a relative path, or list the directory."""
    place = root / inside.lstrip("/")
    if place.parent.resolve().is_relative_to(root):
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # an empty directory of the image stands there
            place.rmdir()
        if not os.path.lexists(place):
            place.symlink_to(outside)


def _lay(lower: str, root: Path, view: PathView) -> None:
    """One tree of the image over those below it. Files are copied: what is in the store stays as it is."""
    todo, made = [(Path(lower), root)], list[tuple[Path, Path]]()
    while todo:
        folder, place = todo.pop()
        made.append((folder, place))
        for entry in os.scandir(folder):
            source, target = Path(entry.path), place / entry.name
            status = source.lstat()
            if stat.S_ISDIR(status.st_mode):
                if is_opaque(source) or target.is_symlink() or not target.is_dir():
                    clear(target)
                    target.mkdir()
                todo.append((source, target))
                continue
            clear(target)
            if stat.S_ISLNK(status.st_mode):
                target.symlink_to(os.fsdecode(view.outside(os.fsencode(source.readlink()))))
            elif not is_whiteout(status):
                shutil.copy2(source, target, follow_symlinks=False)
    for folder, place in reversed(made):
        place.chmod(stat.S_IMODE(folder.stat().st_mode))


def _list_files(root: Path) -> list[tuple[str, tuple[int, int]]]:
    found: list[tuple[str, tuple[int, int]]] = []
    for folder in folders.walk(root):
        found.append((folder.path, (0, 0)))
        for name in folder.others:
            with contextlib.suppress(FileNotFoundError):  # it went away while we looked
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                found.append(("/".join([*folder.names, name]), (status.st_ino, status.st_ctime_ns)))
    return found


def save_changes(home: Home, target: Path) -> None:
    """What was made, changed and removed since, into `target`, as an overlay keeps it."""
    record = msgspec.json.decode((home.path / _RECORD).read_bytes(), type=ViewRecord)
    root, view = Path(record.root), PathView(record.root, record.shown)
    links = {inside.lstrip("/") for inside in record.shown}
    modes: list[tuple[Path, int]] = []
    seen: set[str] = set()
    for folder in folders.walk(root):
        place = target.joinpath(*folder.names)
        place.mkdir(exist_ok=True)
        modes.append((place, stat.S_IMODE(os.fstat(folder.fd).st_mode)))
        seen.add(folder.path)
        for name in folder.others:
            path = "/".join([*folder.names, name])
            seen.add(path)
            if path not in links:
                _save(folder.fd, name, place / name, record.files.get(path), view)
    for path in sorted(record.files.keys() - seen):  # what is in a directory goes with it
        place = target / path
        if path not in links and place.parent.is_dir() and not os.path.lexists(place):
            make_whiteout(place)
    for place, mode in reversed(modes):
        place.chmod(mode)


def _save(folder: int, name: str, place: Path, known: tuple[int, int] | None, view: PathView) -> None:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if (status.st_ino, status.st_ctime_ns) == known:
        return
    if stat.S_ISLNK(status.st_mode):
        place.symlink_to(os.fsdecode(view.inside(os.fsencode(os.readlink(name, dir_fd=folder)))))
    elif stat.S_ISREG(status.st_mode):
        source = os.open(name, OPEN_FILE, dir_fd=folder)
        with os.fdopen(source, "rb") as reader, place.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
        place.chmod(stat.S_IMODE(status.st_mode))
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
