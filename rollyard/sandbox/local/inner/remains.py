"""What a dead sandbox left on the host: its cgroups and its directory. Removed by the zygote, or by a sweep.

Where a sandbox had ids of its own on disk (an ordinary user with newuidmap), only a user namespace with the same map may
remove them, so a process enters one for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from rollyard.core import folders
from rollyard.sandbox.local.inner import idmap, syscalls


def remove_groups(groups: list[str]) -> None:
    for path in groups:
        with contextlib.suppress(OSError):  # gone already, or a process is still leaving it
            os.rmdir(path)


def remove(home: str, groups: list[str]) -> None:
    """The journal entry goes last, so that what is interrupted is found again."""
    remove_groups(groups)
    for name in ("fs", "jobs", "sock"):
        folders.remove(f"{home}/{name}")
    folders.remove(home)


def start_removal(home: str, groups: list[str], id_map: dict[str, Any]) -> int:
    """Remove in a child: trees can be large. Its pid is the caller's to reap."""
    if id_map["kind"] != "helper":
        pid = os.fork()
        if pid == 0:
            _child(home, groups)
        return pid
    go_r, go_w = os.pipe()
    pid = syscalls.clone(syscalls.CLONE_NEWUSER)
    if pid == 0:
        os.close(go_w)
        if os.read(go_r, 1) == b"g":
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        _child(home, groups)
    try:
        idmap.write(pid, id_map)
        os.write(go_w, b"g")
    except OSError:
        pass  # the child does what it may
    finally:
        os.close(go_r)
        os.close(go_w)
    return pid


def try_remove(home: str, groups: list[str]) -> None:
    with contextlib.suppress(OSError):  # what cannot be removed now is found by the next sweep
        remove(home, groups)


def _child(home: str, groups: list[str]) -> None:
    try:
        try_remove(home, groups)
    finally:
        os._exit(0)


def main() -> None:
    """For a sweep in a process that must not fork: arguments are the directory, the groups and the map, as JSON."""
    home, groups, id_map = json.loads(sys.argv[1])
    os.waitpid(start_removal(home, groups, id_map), 0)
