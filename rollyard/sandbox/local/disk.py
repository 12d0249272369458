"""The watch over what sandboxes write to disk. (A tmpfs upper needs none: the kernel bounds it.)

Counting a tree costs a walk, so nothing is counted while the file system as a whole has not filled by a noticeable amount.
A sandbox over its limit has its programs ended; its files stay, so that it can still be judged.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rollyard.core.errors import SandboxError
from rollyard.core.log import Log
from rollyard.images import tree_pipe
from rollyard.sandbox.local.box import LocalSandbox

_NOTICEABLE = 2**20


class LocalDiskWatch:
    def __init__(self, root: Path, *, every_s: float = 1.0) -> None:
        self._root = root
        self._every = every_s
        self._limits: dict[str, tuple[LocalSandbox, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = Log("rollyard.sandbox.local")

    def add(self, box: LocalSandbox, limit_mb: int) -> None:
        self._limits[box.id] = (box, limit_mb * 2**20)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="rollyard-disk")

    def remove(self, sandbox_id: str) -> None:
        self._limits.pop(sandbox_id, None)

    async def _watch(self) -> None:
        before = _used(self._root)
        while self._limits:
            await asyncio.sleep(self._every)
            now = _used(self._root)
            if now - before < _NOTICEABLE:
                before = min(before, now)
                continue
            before = now
            for box, limit in list(self._limits.values()):
                used = await asyncio.to_thread(tree_pipe.usage, str(box.written))
                if used > limit:
                    await self._stop(box, used, limit)

    async def _stop(self, box: LocalSandbox, used: int, limit: int) -> None:
        self._log.warning("sandbox.over_disk_limit", sandbox=box.id, used_mb=used >> 20, limit_mb=limit >> 20)
        try:
            await box.kill_processes()
        except SandboxError:  # it ended meanwhile
            self.remove(box.id)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _used(root: Path) -> int:
    status = os.statvfs(root)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
