"""What programs leave in memory when they end: System V segments, semaphores and queues, and the files of /dev/shm.

They belong to the namespace and outlive every process in it, so they are removed with the processes.
"""

from __future__ import annotations

import contextlib
import os

from rollyard.core import folders
from rollyard.sandbox.local.inner import syscalls

_SHM = "/dev/shm"


def remove_shared_memory() -> None:
    for kind in ("shm", "sem", "msg"):
        for number in _identifiers(kind):
            syscalls.remove_ipc(kind, number)
    with contextlib.suppress(OSError):
        for name in os.listdir(_SHM):
            with contextlib.suppress(OSError):
                folders.remove(f"{_SHM}/{name}")


def _identifiers(kind: str) -> list[int]:
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(line.split()[1]) for line in file.readlines()[1:]]
    except (OSError, ValueError, IndexError):
        return []
