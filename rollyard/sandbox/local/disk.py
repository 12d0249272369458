"""The watch over what sandboxes write to disk. (A tmpfs upper needs none: the kernel bounds it.)

Counting a tree costs a walk, so nothing is counted while the file system as a whole has not filled by a noticeable amount, and
the longer a counting took, the longer is the pause until the next.
What counts are blocks and inodes, also those of files that have no name any more and that a process still holds. A sandbox over
its limit has its programs ended; its files stay, so that it can still be judged. An error in one counting ends neither the watch
nor the counting of the others, and neither does any other error: it is logged, and the watch goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rollyard.core.errors import SandboxError
from rollyard.core.log import Log
from rollyard.images import tree_pipe
from rollyard.images.tree_pipe import DiskUse
from rollyard.sandbox.local.box import LocalSandbox
from rollyard.sandbox.local.cgroups import default_memory_mb
from rollyard.sandbox.local.probe import NAMESPACED

_NOTICEABLE = 2**20
_NOTICEABLE_INODES = 512
_BYTES_PER_INODE = 4096
_LEAST_MB = 4096
_LONGEST_S = 30.0  # between two countings
_SHARE = 0.1  # of the time that counting may take: its thread keeps the loop from working meanwhile


class LocalDiskWatch:
    def __init__(self, root: Path, *, every_s: float = 1.0) -> None:
        self._root = root
        self._every = every_s
        self._limits: dict[str, tuple[LocalSandbox, DiskUse]] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = Log("rollyard.sandbox.local")

    def add(self, box: LocalSandbox, limit_mb: int) -> None:
        self._limits[box.id] = (box, disk_limit(limit_mb))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="rollyard-disk")

    def remove(self, sandbox_id: str) -> None:
        self._limits.pop(sandbox_id, None)

    async def _watch(self) -> None:
        before: DiskUse | None = None
        while self._limits:
            began = time.monotonic()
            try:
                before = await self._count(before)
            except Exception as error:  # noqa: BLE001 - whatever an agent found to break this with must not end the watch
                self._log.warning("sandbox.disk_watch_failed", error=f"{type(error).__name__}: {error}")
            took = time.monotonic() - began
            await asyncio.sleep(min(max(self._every, took * (1 / _SHARE - 1)), _LONGEST_S))

    async def _count(self, before: DiskUse | None) -> DiskUse:
        """Counts where the file system has filled since `before`; gives what to compare with next."""
        now = _measure(self._root)
        if before is None:
            return now
        if now.bytes - before.bytes < _NOTICEABLE and now.inodes - before.inodes < _NOTICEABLE_INODES:
            return DiskUse(min(before.bytes, now.bytes), min(before.inodes, now.inodes))
        failed: Exception | None = None
        for box, limit in list(self._limits.values()):
            try:
                used = await asyncio.to_thread(_measure_box, box)
                if used.bytes > limit.bytes or used.inodes > limit.inodes:
                    await self._stop(box, used, limit)
            except Exception as error:  # noqa: BLE001 - the others are counted all the same
                self._log.warning("sandbox.disk_not_counted", sandbox=box.id, error=f"{type(error).__name__}: {error}")
                failed = error
        return before if failed is not None else now  # what was not counted is counted again

    async def _stop(self, box: LocalSandbox, used: DiskUse, limit: DiskUse) -> None:
        self._log.warning(
            "sandbox.over_disk_limit",
            sandbox=box.id,
            used_mb=used.bytes >> 20,
            limit_mb=limit.bytes >> 20,
            inodes=used.inodes,
            max_inodes=limit.inodes,
        )
        try:
            await box.kill_processes()
        except SandboxError:  # it ended meanwhile
            self.remove(box.id)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def default_disk_mb(root: Path, disk: Literal["disk", "tmpfs"]) -> int:
    """What a sandbox may write that names no limit: 4 GiB or a tenth of the file system if that is more, and never more than
    half of it; in memory never more than half of that."""
    if disk == "tmpfs":
        return min(_LEAST_MB, default_memory_mb() or _LEAST_MB)
    status = os.statvfs(root)
    total = status.f_blocks * status.f_frsize >> 20
    return max(1, min(max(_LEAST_MB, total // 10), total // 2))


def disk_limit(limit_mb: int) -> DiskUse:
    return DiskUse(limit_mb * 2**20, limit_mb * 2**20 // _BYTES_PER_INODE)


def _measure(root: Path) -> DiskUse:
    status = os.statvfs(root)
    return DiskUse((status.f_blocks - status.f_bfree) * status.f_frsize, status.f_files - status.f_ffree)


def _measure_box(box: LocalSandbox) -> DiskUse:
    named = tree_pipe.usage(str(box.written))
    nameless = _nameless_files(_find_processes(box)) if box.info.level in NAMESPACED else DiskUse(0, 0)
    return DiskUse(named.bytes + nameless.bytes, named.inodes + nameless.inodes)


def _find_processes(box: LocalSandbox) -> list[str]:
    """Of one sandbox: those in its control group; where it has none, those in the namespace of its first process, for which all
    of the machine's are looked at."""
    if box.group.dirs:
        groups = (Path(folder) for folder, _, _ in os.walk(box.group.dirs[0]))
        return [pid for group in groups for pid in _read_processes(group)]
    try:
        namespace = Path(f"/proc/{box.info.pid}/ns/pid").readlink()
    except OSError:
        return []
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _is_in(pid, namespace)]


def _read_processes(group: Path) -> list[str]:
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError:  # it ended meanwhile
        return []


def _is_in(pid: str, namespace: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() == namespace
    except OSError:
        return False


def _nameless_files(pids: Iterable[str]) -> DiskUse:
    """Files and directories without a name that one of these processes holds open or mapped."""
    found: dict[tuple[int, int], int] = {}
    for link in (link for pid in pids for link in _list_open_files(pid)):
        with contextlib.suppress(OSError):
            status = os.stat(link)  # noqa: PTH116 - of hundreds of links for each sandbox, and a Path costs more than the call
            if status.st_nlink == 0 and stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return DiskUse(sum(found.values()), len(found))


def _list_open_files(pid: str) -> list[str]:
    links = [f"/proc/{pid}/cwd"]
    for place in ("fd", "map_files"):
        with contextlib.suppress(OSError):
            links += [f"/proc/{pid}/{place}/{name}" for name in os.listdir(f"/proc/{pid}/{place}")]
    return links
