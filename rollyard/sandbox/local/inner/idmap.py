"""Id maps of user namespaces. Three kinds:

- `range`: real root maps a whole range of unused ids, so the sandbox has users and none of them is one of the host's;
- `helper`: an ordinary user with entries in /etc/subuid, through newuidmap and newgidmap;
- `single`: an ordinary user without: root inside is the user outside, and there is nobody else.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from rollyard.sandbox.local.inner import syscalls


def write(pid: int, kind: dict[str, Any]) -> None:
    """Give `pid`'s user namespace its map. Only its parent can, and once."""
    uid_map: list[list[int]] = kind["uids"]
    gid_map: list[list[int]] = kind["gids"]
    if kind["kind"] == "helper":
        _helper("newuidmap", pid, uid_map)
        _helper("newgidmap", pid, gid_map)
        return
    if kind["kind"] == "single":
        write_text(f"/proc/{pid}/setgroups", "deny")
    write_text(f"/proc/{pid}/uid_map", "\n".join(" ".join(map(str, row)) for row in uid_map))
    write_text(f"/proc/{pid}/gid_map", "\n".join(" ".join(map(str, row)) for row in gid_map))


def write_text(path: str, text: str) -> None:
    """In one write, as the kernel's files want it; an error names the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _helper(name: str, pid: int, rows: list[list[int]]) -> None:
    argv = [name, str(pid), *(str(number) for row in rows for number in row)]
    child = os.posix_spawn(f"/usr/bin/{name}", argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError(1, "the id map was refused; see /etc/subuid and /etc/subgid", name)


def namespace(kind: dict[str, Any]) -> int:
    """A descriptor of a user namespace that has this map and no process."""
    pid = syscalls.clone(syscalls.CLONE_NEWUSER)
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        write(pid, kind)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
