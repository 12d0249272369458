"""The watch over what containers write: engines bound a disk only on a few file systems, so it is measured.

One question to the engine answers for all sandboxes with a limit; none is asked when there is no such sandbox. A sandbox over
its limit has its programs ended; its files stay, so that it can still be judged.
"""

from __future__ import annotations

import asyncio

from rollyard.core.errors import SandboxError, SandboxGone
from rollyard.core.log import Log
from rollyard.sandbox.docker import container
from rollyard.sandbox.docker.box import DockerSandbox
from rollyard.sandbox.docker.engine import DockerEngine

EVERY_S = 5.0
_ASK_S = 120.0


class ContainerDiskWatch:
    def __init__(self, engine: DockerEngine, *, every_s: float = EVERY_S) -> None:
        self._engine, self._every = engine, every_s
        self._limits: dict[str, tuple[DockerSandbox, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = Log("rollyard.sandbox.docker")

    def add(self, box: DockerSandbox, limit_mb: int) -> None:
        self._limits[box.id] = (box, limit_mb * 2**20)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="rollyard-docker-disk")

    def remove(self, sandbox_id: str) -> None:
        self._limits.pop(sandbox_id, None)

    async def _watch(self) -> None:
        while self._limits:
            await asyncio.sleep(self._every)
            try:
                await self._look()
            except SandboxError as error:  # the engine is busy or going away; the next look may succeed
                self._log.warning("sandbox.disk_not_measured", error=str(error))

    async def _look(self) -> None:
        params = {"size": True, "filters": container.label_filter(None)}
        listed = await self._engine.call("GET", "containers/json", params=params, timeout=_ASK_S)
        sizes = {row["Id"]: row.get("SizeRw") or 0 for row in listed}
        for box, limit in list(self._limits.values()):
            used = sizes.get(box.container, 0)
            if used > limit:
                self._log.warning("sandbox.over_disk_limit", sandbox=box.id, used_mb=used >> 20, limit_mb=limit >> 20)
                try:
                    await box.kill_processes()
                except SandboxGone:
                    self.remove(box.id)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
