"""Builds the root a sandbox sees, from inside its new mount namespace, and moves into it.

Everything that will be visible is first held as a detached mount, put under short names on a private staging tmpfs, and
attached only after `pivot_root`. So a symlink in an image cannot send a mount target to the host, mount options stay
short however deep the stack of layers is, and `/proc/mounts` inside shows no host path.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from rollyard.sandbox.local.inner import syscalls as sys
from rollyard.sandbox.local.inner.sources import HeldMount

Plan = dict[str, Any]
STAGE = "/sys"  # a directory every system has and no image lies below
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEV_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


class StagingArea:
    """What can be made before it is known what the sandbox will show: the staging area, /proc and /dev."""

    def __init__(self, *, proc: bool) -> None:
        devices = [sys.open_tree(f"/dev/{name}") for name in DEVICES]
        sys.mount("none", "/", None, sys.MS_REC | sys.MS_PRIVATE)
        sys.mount("stage", STAGE, "tmpfs", 0, "mode=755,size=1m")
        os.chdir(STAGE)
        self._system: list[tuple[int, str]] = []
        if proc:
            os.mkdir("p")
            sys.mount("proc", "p", "proc", sys.MS_NOSUID | sys.MS_NODEV | sys.MS_NOEXEC)
            self._system.append((sys.open_tree("p"), "/proc"))
        _devices(devices)
        self._system.append((sys.open_tree("d", recursive=True), "/dev"))

    def enter(self, plan: Plan, held: HeldMount) -> int | None:
        """Build the root and pivot into it. Returns a descriptor of the tmpfs that takes what is written, if one does."""
        mounts = list(held.mounts)
        os.mkdir("w")
        upper = None
        if plan["writable"]:
            sys.move_mount(mounts.pop(0), "w")
        else:
            sys.mount("tmp", "w", "tmpfs", 0, f"mode=755,size={plan['tmpfs_mb']}m,nr_inodes={plan['inodes']}")
            upper = os.open("w", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _overlay("root", _place("l", [mounts.pop(0) for _ in plan["lowers"]]))
        attach = _trees(plan, held, mounts)
        attach += _list_binds(held, late=False)
        attach += self._system
        attach += [(mounts.pop(0), f"/dev/{os.path.basename(path)}") for path in plan["devices"]]
        attach += [(_seal(mounts.pop(0), writable=bind["writable"]), bind["target"]) for bind in plan["binds"]]
        attach += _list_binds(held, late=True)
        os.chdir("root")
        sys.pivot_root(".", ".")
        sys.umount(".")
        os.chdir("/")
        for fd, target in attach:
            _attach(fd, target)
        for target in held.hidden:
            sys.mount("none", target, "tmpfs", sys.MS_RDONLY | sys.MS_NOSUID | sys.MS_NODEV, "mode=555,size=4k")
        return upper


def _trees(plan: Plan, held: HeldMount, mounts: list[int]) -> list[tuple[int, str]]:
    attach: list[tuple[int, str]] = []
    for number, tree in enumerate(plan["trees"]):
        *over, source = (mounts.pop(0) for _ in (*tree["over"], tree["source"]))
        if tree["writable"] and tree["target"] not in held.bound:
            _overlay(f"t{number}", _place(f"s{number}_", [*over, source]))
            attach.append((sys.open_tree(f"t{number}"), tree["target"]))
            continue
        if tree["writable"]:
            _upper(f"t{number}")  # nothing will be in it, and a snapshot finds just that
        attach.append((_seal(source, writable=False), tree["target"]))
    return attach


def _list_binds(held: HeldMount, *, late: bool) -> list[tuple[int, str]]:
    return [(_seal(mount.fd, writable=mount.writable), mount.target) for mount in held.below if mount.late == late]


def _attach(fd: int, target: str) -> None:
    """Directories on directories, files on files. What an image has made of the place otherwise stands."""
    target = os.path.realpath(target)  # in the new root: a link of the image's leads nowhere else
    folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    try:
        there = stat.S_ISDIR(os.stat(target).st_mode)
    except FileNotFoundError:
        there = folder
        os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
        if not folder:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    if there == folder:
        sys.move_mount(fd, target)
    os.close(fd)


def _place(prefix: str, mounts: list[int]) -> list[str]:
    names: list[str] = []
    for number, fd in enumerate(mounts):
        name = f"{prefix}{number}"
        os.mkdir(name)
        sys.move_mount(fd, name)
        os.close(fd)
        names.append(name)
    return names


def _overlay(name: str, lowers: list[str]) -> None:
    """Mount at `name` an overlay that keeps its changes in `w/<name>`."""
    _upper(name)
    os.mkdir(name)
    options = f"lowerdir={':'.join(lowers)},upperdir=w/{name}/upper,workdir=w/{name}/work,userxattr"
    sys.mount("overlay", name, "overlay", 0, options)


def _upper(name: str) -> None:
    for part in (f"w/{name}", f"w/{name}/upper", f"w/{name}/work"):
        os.mkdir(part)


def _seal(fd: int, *, writable: bool) -> int:
    flags = sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV
    sys.mount_setattr(fd, flags if writable else flags | sys.MOUNT_ATTR_RDONLY)
    return fd


def _devices(devices: list[int]) -> None:
    os.mkdir("d")
    sys.mount("dev", "d", "tmpfs", sys.MS_NOSUID, "mode=755,size=64m")
    for name, fd in zip(DEVICES, devices, strict=True):
        os.close(os.open(f"d/{name}", os.O_WRONLY | os.O_CREAT, 0o666))
        sys.move_mount(fd, f"d/{name}")
        os.close(fd)
    for name, target in DEV_LINKS.items():
        os.symlink(target, f"d/{name}")
    os.mkdir("d/pts")
    sys.mount("devpts", "d/pts", "devpts", sys.MS_NOSUID | sys.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    os.mkdir("d/shm")
    os.chmod("d/shm", 0o1777)  # noqa: S103 - what /dev/shm is
