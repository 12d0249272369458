"""Host directories that a sandbox will show, held as detached mounts before they are put together.

Where something is mounted below a directory the kernel distinguishes: root, outside any user namespace, may take the
directory without what is mounted below it, and takes those one by one. Inside a user namespace what lies under a mount must
stay hidden, so a directory is taken with all its mounts or not at all; overlayfs refuses it as a lower then, and it is bound
read-only as it is. An ordinary user loses nothing by that: the files are root's, and not his to change in an overlay either.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

from rollyard.images import mount_table
from rollyard.sandbox.local.inner import syscalls as sys

Plan = dict[str, Any]
MAX_BELOW = 96  # each is a descriptor, and a message carries 250


class NestedMount(NamedTuple):
    """A mount for a place inside a tree, or `late` inside a bind."""

    target: str
    late: bool
    writable: bool
    fd: int


class HeldMount:
    """`mounts` in the order in which `mounts.Stage.enter` takes them: the writable part, lowers, for each tree what lies over
    it and its source, devices, binds. `bound` are the targets of writable trees that can only be bound. `below` comes on top of
    these; `hidden` are places to be covered. `shifted`: the writable part keeps the namespace's ids on disk."""

    def __init__(self) -> None:
        self.mounts: list[int] = []
        self.bound: list[str] = []
        self.below: list[NestedMount] = []
        self.hidden: list[str] = []
        self.shifted = False

    @property
    def fds(self) -> list[int]:
        return [*self.mounts, *(mount.fd for mount in self.below)]

    def message(self) -> Plan:
        """What goes beside the descriptors to the process that mounts them."""
        below = [(mount.target, mount.late, mount.writable) for mount in self.below]
        return {"bound": self.bound, "below": below, "hidden": self.hidden}

    @staticmethod
    def receive(message: Plan, fds: list[int]) -> HeldMount:
        held = HeldMount()
        count = len(fds) - len(message["below"])
        held.mounts, held.bound, held.hidden = fds[:count], message["bound"], message["hidden"]
        places: list[tuple[str, bool, bool]] = message["below"]
        held.below = [NestedMount(*place, fd) for place, fd in zip(places, fds[count:], strict=True)]
        return held


def hold(
    plan: Plan, held: HeldMount, *, userns: int | None = None, mounted: mount_table.MountTable | None = None
) -> None:
    """Fill `held` with what `plan` shows. Real root gives the user namespace by which ids are mapped where the file system
    can, and the table of the mounts to show one by one."""
    if plan["writable"]:
        fd, mapped = _part(plan["writable"], userns)
        held.mounts.append(fd)
        held.shifted = userns is not None and not mapped
    for path in plan["lowers"]:
        held.mounts.append(_part(path, userns)[0])
    for tree in plan["trees"]:
        for path in tree["over"]:
            held.mounts.append(_part(path, userns)[0])
        inside = _hold_tree(tree, held, userns, mounted)
        if inside is None:
            held.bound.append(tree["target"])
        # Not mapped: what only the host's root may read there stays closed.
        _hold_below(tree, inside or [], held)
    for path in plan["devices"]:  # not mapped: a node is used by the rights of its mode
        held.mounts.append(sys.open_tree(path))
    for bind in plan["binds"]:
        inside = _hold_tree(bind, held, userns, mounted)
        _hold_below(bind, inside or [], held, late=True, writable=bind["writable"], userns=userns)


def _part(path: str, userns: int | None) -> tuple[int, bool]:
    """A directory of ours, or an image: never with what is mounted below it."""
    try:
        fd = sys.open_tree(path)
    except OSError as error:
        raise _in_the_way(error, path) from None
    return fd, _map(fd, userns)


def _hold_tree(
    tree: Plan, held: HeldMount, userns: int | None, mounted: mount_table.MountTable | None
) -> list[mount_table.MountRow] | None:
    """Hold the source of a tree or a bind, and return what is mounted below it; None when it came along."""
    source = tree["source"]
    try:
        inside = [mount for mount in mounted.below(source) if not mount.view] if mounted else []
        if len(held.below) + len(inside) > MAX_BELOW:
            raise OSError(errno.EINVAL, "")
        held.mounts.append(sys.open_tree(source))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _hold_whole(tree, held)
        return None
    _map(held.mounts[-1], userns)
    return inside


def _hold_below(
    tree: Plan,
    inside: list[mount_table.MountRow],
    held: HeldMount,
    *,
    late: bool = False,
    writable: bool = False,
    userns: int | None = None,
) -> None:
    for mount in inside:
        try:
            fd = sys.open_tree(mount.point)
        except OSError:
            continue  # it went away, another mount hides it, or it may not be bound: its place shows what lies under it
        held.below.append(NestedMount(_place(tree, mount), late, writable, fd))
        _map(fd, userns)


def _hold_whole(tree: Plan, held: HeldMount) -> None:
    """With everything that is mounted below it. Views of the machine come along, so they are covered later."""
    found = mount_table.below(mount_table.read(), tree["source"])
    if any(os.listdir(path) for path in tree["over"]):
        what = f"{tree['target']}, which this image changes ({_name_of(found)})"
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), what)
    try:
        held.mounts.append(sys.open_tree(tree["source"], recursive=True))
    except OSError as error:
        raise _in_the_way(error, tree["source"]) from None
    held.hidden += [_place(tree, mount) for mount in found if mount.view]


def _place(tree: Plan, mount: mount_table.MountRow) -> str:
    """Where in the sandbox a mount of the host comes to lie."""
    return tree["target"].rstrip("/") + mount.point[len(tree["source"].rstrip("/")) :]


def _map(fd: int, userns: int | None) -> bool:
    """Whether the namespace's ids on this mount are those on disk; some file systems cannot."""
    if userns is None:
        return False
    try:
        sys.mount_setattr(fd, sys.MOUNT_ATTR_IDMAP, userns)
    except OSError:
        return False
    return True


def _in_the_way(error: OSError, path: str) -> OSError:
    found = mount_table.below(mount_table.read(), path) if error.errno in (errno.EINVAL, errno.EPERM) else []
    return OSError(error.errno, error.strerror, f"{error.filename}{f' ({_name_of(found)})' if found else ''}")


def _name_of(found: list[mount_table.MountRow]) -> str:
    points = [mount.point for mount in found]
    rest = f" and {len(points) - 3} more" if len(points) > 3 else ""
    return f"mounted below it: {', '.join(points[:3])}{rest}"
