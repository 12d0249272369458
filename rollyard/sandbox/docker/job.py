"""One background program: the durable shim's files inside, and, when it was started here with one, its stdin."""

from __future__ import annotations

import time

from rollyard.core.errors import PathError, Unsupported
from rollyard.sandbox import job_shim
from rollyard.sandbox.docker.engine import Stream
from rollyard.sandbox.docker.files import DockerFiles
from rollyard.sandbox.job_shim import ShimJob

_CPU_EVERY_S = 2.0


class DockerJob(ShimJob):
    """`files` reads its output where no program can be started: in a paused sandbox."""

    def __init__(
        self, files: DockerFiles, job_id: str, *, started: float | None = None, stdin: Stream | None = None
    ) -> None:
        super().__init__(files.exec_plain, job_id, started=started)
        self._files, self._stdin = files, stdin
        self._place = f"{job_shim.ROOT}/{job_id}"
        self._cpu: tuple[float, float | None] = (-_CPU_EVERY_S, None)

    async def tail(self, n: int = 4096, *, stderr: bool = False) -> bytes:
        if not await self._files.is_paused():
            return await super().tail(n, stderr=stderr)
        data = await self._files.read(f"{self._place}/{'err' if stderr else 'out'}", max_bytes=2**30)
        return data[-n:]

    async def write(self, data: bytes) -> None:
        if self._stdin is None:
            raise Unsupported(f"job {self.id} has no stdin here", hint="start it with stdin=True and keep that object")
        try:
            await self._stdin.send(data)
        except ConnectionError:
            raise PathError(f"stdin of {self.id}", "EPIPE", hint="the program has ended or closed it") from None

    async def close_stdin(self) -> None:
        if self._stdin is not None:
            await self._stdin.send_eof()

    async def cpu_s(self) -> float | None:
        """Asked at most every two seconds: it costs a program in the sandbox."""
        at, seen = self._cpu
        if time.monotonic() - at >= _CPU_EVERY_S:
            seen = await super().cpu_s()
            self._cpu = (time.monotonic(), seen)
        return seen

    async def kill(self) -> None:
        """By the job's own user, who alone may read its processes' environment, then by root."""
        owner = (await self._files.script('stat -c %u "$1"', self._place)).stdout.strip().decode()
        if owner.isdigit() and owner != "0":
            await job_shim.kill_tree(self._files.exec_plain, self.id, user=owner)
        await super().kill()
        self.let_go()

    def let_go(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
