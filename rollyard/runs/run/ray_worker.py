"""The worker as Ray runs it on a node. It imports no Ray."""

from __future__ import annotations

import asyncio
import os

from rollyard.runs.run.distant_worker import NodeAssignment, WorkerEnd, work_to_the_end

LINGER_S = 15.0


class NodeWorker:
    """The class that Ray makes an actor of. `run` may be called again by a driver that came back."""

    def __init__(self, posting: NodeAssignment) -> None:
        self._posting = posting
        self._task: asyncio.Task[WorkerEnd] | None = None
        os.environ.update(posting.secrets)

    async def run(self) -> WorkerEnd:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Cancel what is in flight, give the attempts back, remove the sandboxes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _work(self) -> WorkerEnd:
        ended = await work_to_the_end(self._posting)
        # The driver ends this process once it has read how the run ended. Where no driver is left, it ends itself.
        asyncio.get_running_loop().call_later(LINGER_S, os._exit, 0)
        return ended
