"""Who a program runs as: names and numbers out of the image's own passwd and group files.

The files belong to the sandbox and may say anything. That is harmless: ids outside the sandbox's range do not exist there.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class User(NamedTuple):
    uid: int
    gid: int
    groups: list[int]
    name: str
    home: str


def _rows(path: str, width: int) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.rstrip("\n").split(":") for line in file.read(2**20).splitlines()]
    except OSError:
        return []
    return [row for row in rows if len(row) >= width]


def find(wanted: str | None) -> User:
    """`None` is root. `name`, `uid`, or either with `:group`; an unknown name is ENOENT, an unknown number is used as is."""
    if wanted is None or wanted in ("root", "0"):
        return User(0, 0, [], "root", "/root")
    name, _, group = wanted.partition(":")
    passwd = _rows("/etc/passwd", 6)
    row = next((r for r in passwd if r[0] == name or r[2] == name), None)
    if row is not None:
        uid, gid, name, home = int(row[2]), int(row[3]), row[0], row[5] or "/"
    elif name.isdigit():
        uid, gid, home = int(name), int(name), "/"
    else:
        raise OSError(errno.ENOENT, "no such user", wanted)
    groups = _rows("/etc/group", 4)
    member = [int(r[2]) for r in groups if name in r[3].split(",") and r[2].isdigit()]
    if group:
        match = next((r for r in groups if r[0] == group), None)
        if match is None and not group.isdigit():
            raise OSError(errno.ENOENT, "no such group", wanted)
        gid = int(match[2]) if match else int(group)
    return User(uid, gid, member, name, home)
