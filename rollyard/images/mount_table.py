"""The mount table: what is mounted below a directory.

A GPU driver at `/usr/local/nvidia`, a library bound over a file, a disk at `/usr/src`: a directory of the host is often not
one mount but several, and the kernel treats it differently then (see `sources`).
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from typing import NamedTuple

PLACE = "/proc/self/mountinfo"
# Views of the machine, not files: they are never shown, wherever they are mounted.
VIEWS = frozenset({
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl",
    "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs",
})  # fmt: skip
_ESCAPE = re.compile(rb"\\([0-7]{3})")


class MountRow(NamedTuple):
    """One line: `device` and `root` say what of which file system lies at `point`."""

    number: int
    parent: int
    device: str
    root: str
    point: str
    kind: str

    @property
    def view(self) -> bool:
        return self.kind in VIEWS


def read(raw: bytes | None = None) -> list[MountRow]:
    if raw is None:
        with open(PLACE, "rb") as file:
            raw = file.read()
    return [_mount(line) for line in raw.splitlines()]


def kind_at(path: str) -> str:
    """The kind of the file system that a directory is on."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return next((row.kind for row in reversed(read()) if row.device == name), "")


def _mount(line: bytes) -> MountRow:
    left, _, right = line.partition(b" - ")
    number, parent, device, root, point, *_ = left.split(b" ")
    return MountRow(
        int(number), int(parent), device.decode(), _plain(root), _plain(point), right.split(b" ", 1)[0].decode()
    )


def _plain(name: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), name))


def below(rows: list[MountRow], directory: str) -> list[MountRow]:
    """The mounts one meets on a walk below `directory`, outer ones first, each place once."""
    inside = directory.rstrip("/") + "/"
    if not any(row.point.startswith(inside) for row in rows):
        return []
    seen = {_number(directory)}
    found: dict[str, MountRow] = {}
    for row in _outer_first(rows):
        if row.parent in seen and row.point.startswith(inside):
            seen.add(row.number)
            found[row.point] = row  # what is mounted over another at the same place hides it
    return list(found.values())


def _outer_first(rows: list[MountRow]) -> Iterator[MountRow]:
    """A parent before its children; the kernel lists them by age, and a mount can be moved below a younger one."""
    children: dict[int, list[MountRow]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
    known = {row.number for row in rows}
    queue = [row for row in rows if row.parent not in known or row.parent == row.number]
    seen: set[int] = set()
    while queue:
        row = queue.pop(0)
        if row.number not in seen:
            seen.add(row.number)
            yield row
            queue += children.get(row.number, [])


def _number(directory: str) -> int:
    """The mount that `directory` lies on."""
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file.read().splitlines())
        return int(fields[b"mnt_id"])
    finally:
        os.close(fd)


class MountTable:
    """The table of this process, read again only after the kernel says that it has changed."""

    def __init__(self) -> None:
        self._fd = os.open(PLACE, os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._fd, select.POLLPRI | select.POLLERR)
        self._rows: list[MountRow] | None = None
        self._below: dict[str, list[MountRow]] = {}

    def below(self, directory: str) -> list[MountRow]:
        if self._changes.poll(0) or self._rows is None:
            self._rows, self._below = read(), {}
        if directory not in self._below:
            self._below[directory] = below(self._rows, directory)
        return self._below[directory]
