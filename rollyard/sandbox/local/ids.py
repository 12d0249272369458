"""Which ids a sandbox's user namespace is mapped to, for the user that runs this process."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import Literal

import msgspec

# An aligned range that neither login users nor /etc/subuid defaults reach. All sandboxes share it: they cannot see each
# other's processes or files, and id-mapped mounts keep it off the disk.
RANGE_BASE = 1_600_061_440
RANGE_SIZE = 65536


class IdMap(msgspec.Struct, frozen=True):
    """Rows are (inside, outside, count), as the kernel wants them."""

    kind: Literal["range", "helper", "single"]
    uids: tuple[tuple[int, int, int], ...]
    gids: tuple[tuple[int, int, int], ...]

    @property
    def many(self) -> bool:
        """Whether there is any user but root inside."""
        return self.kind != "single"


def candidates() -> list[IdMap]:
    """Maps to try for this user, the best first."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        row = ((0, RANGE_BASE, RANGE_SIZE),)
        return [IdMap("range", row, row)]
    single = IdMap("single", ((0, uid, 1),), ((0, gid, 1),))
    uids, gids = _subordinate("/etc/subuid", uid), _subordinate("/etc/subgid", uid)
    if uids and gids and shutil.which("newuidmap") and shutil.which("newgidmap"):
        return [IdMap("helper", ((0, uid, 1), (1, *uids)), ((0, gid, 1), (1, *gids))), single]
    return [single]


def _subordinate(path: str, uid: int) -> tuple[int, int] | None:
    """The first range of at least 1000 ids given to this user."""
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        rows = [line.split(":") for line in Path(path).read_text().splitlines()]
    except OSError:
        return None
    for row in rows:
        if len(row) == 3 and row[0] in names and int(row[2]) >= 1000:
            return int(row[1]), min(int(row[2]), RANGE_SIZE - 1)
    return None
