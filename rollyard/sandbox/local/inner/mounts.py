"""Builds the root a sandbox sees, from inside its new mount namespace, and moves into it.

Everything that will be visible is first held as a detached mount, put under short names on a private staging tmpfs, and
attached only after `pivot_root`. So a symlink in an image cannot send a mount target to the host, mount options stay
short however deep the stack of layers is, and `/proc/mounts` inside shows no host path.
"""

from __future__ import annotations

import os
from typing import Any

from rollyard.sandbox.local.inner import syscalls as sys

Plan = dict[str, Any]
STAGE = "/sys"  # a directory every system has and no image lies below
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEV_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def sources(plan: Plan) -> list[str]:
    """Host directories the plan shows, in the order `enter` takes their mounts: the writable part, lowers, trees (what lies
    over one first), binds."""
    out = [plan["writable"]] if plan["writable"] else []
    out += plan["lowers"]
    for tree in (*plan["trees"], *plan["binds"]):
        out += [*tree["over"], tree["source"]]
    return out


def id_mapped(path: str, userns: int) -> tuple[int, bool]:
    """A detached mount of `path`, and whether the namespace's ids on it are those on disk; some filesystems cannot."""
    fd = sys.open_tree(path)
    try:
        sys.mount_setattr(fd, sys.MOUNT_ATTR_IDMAP, userns)
    except OSError:
        return fd, False
    return fd, True


class Stage:
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

    def enter(self, plan: Plan, held: list[int]) -> int | None:
        """Build the root and pivot into it. Returns a descriptor of the tmpfs that takes what is written, if one does."""
        mounts = list(held)
        os.mkdir("w")
        upper = None
        if plan["writable"]:
            sys.move_mount(mounts.pop(0), "w")
        else:
            sys.mount("tmp", "w", "tmpfs", 0, f"mode=755,size={plan['tmpfs_mb']}m")
            upper = os.open("w", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _overlay("root", _place("l", [mounts.pop(0) for _ in plan["lowers"]]))
        attach: list[tuple[int, str]] = []
        for number, tree in enumerate(plan["trees"]):
            if tree["writable"]:
                _overlay(f"t{number}", _place(f"s{number}_", [mounts.pop(0) for _ in (*tree["over"], tree["source"])]))
                attach.append((sys.open_tree(f"t{number}"), tree["target"]))
            else:
                attach.append((_sealed(mounts.pop(0), writable=False), tree["target"]))
        attach += self._system
        attach += [(_sealed(mounts.pop(0), writable=bind["writable"]), bind["target"]) for bind in plan["binds"]]
        os.chdir("root")
        sys.pivot_root(".", ".")
        sys.umount(".")
        os.chdir("/")
        for fd, target in attach:
            if not os.path.isdir(target):
                os.makedirs(target)
            sys.move_mount(fd, target)
            os.close(fd)
        return upper


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
    for part in (f"w/{name}", f"w/{name}/upper", f"w/{name}/work"):
        os.mkdir(part)
    os.mkdir(name)
    options = f"lowerdir={':'.join(lowers)},upperdir=w/{name}/upper,workdir=w/{name}/work,userxattr"
    sys.mount("overlay", name, "overlay", 0, options)


def _sealed(fd: int, *, writable: bool) -> int:
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
