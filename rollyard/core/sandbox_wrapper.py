"""A sandbox around another one: everything is passed on, and a subclass changes what it means to change."""

from __future__ import annotations

from rollyard.core.program import Program, ProgramCalls
from rollyard.core.protocols import ByteStream, Job, Listener, Sandbox
from rollyard.core.sandbox import Exit, Stat


class SandboxWrapper(ProgramCalls):
    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.egress = sandbox.egress
        self.id, self.info, self.capabilities = sandbox.id, sandbox.info, sandbox.capabilities

    async def _exec(self, program: Program, timeout: float) -> Exit:
        return await self.sandbox.exec(program)

    async def _start(self, program: Program) -> Job:
        return await self.sandbox.start(program)

    async def job(self, job_id: str) -> Job:
        return await self.sandbox.job(job_id)

    async def read(self, path: str, *, max_bytes: int = 64 * 2**20) -> bytes:
        return await self.sandbox.read(path, max_bytes=max_bytes)

    async def read_text(self, path: str, *, max_bytes: int = 64 * 2**20) -> str:
        return await self.sandbox.read_text(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        await self.sandbox.write(path, data, mode=mode, user=user)

    async def exists(self, path: str) -> bool:
        return await self.sandbox.exists(path)

    async def stat(self, path: str) -> Stat:
        return await self.sandbox.stat(path)

    async def list_dir(self, path: str) -> list[Stat]:
        return await self.sandbox.list_dir(path)

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        await self.sandbox.mkdir(path, mode=mode, user=user)

    async def remove(self, path: str) -> None:
        await self.sandbox.remove(path)

    async def upload_dir(self, source: str, path: str, *, user: str | None = None) -> None:
        await self.sandbox.upload_dir(source, path, user=user)

    async def download_dir(self, path: str, target: str, *, max_bytes: int = 2**30) -> int:
        return await self.sandbox.download_dir(path, target, max_bytes=max_bytes)

    async def listen(self, port: int = 0) -> Listener:
        return await self.sandbox.listen(port)

    async def dial(self, port: int) -> ByteStream:
        return await self.sandbox.dial(port)

    async def snapshot(self) -> str:
        return await self.sandbox.snapshot()

    async def extend(self, ttl_s: float) -> None:
        await self.sandbox.extend(ttl_s)

    async def pause(self) -> None:
        await self.sandbox.pause()

    async def resume(self) -> None:
        await self.sandbox.resume()

    async def alive(self) -> bool:
        return await self.sandbox.alive()

    async def kill_processes(self) -> None:
        await self.sandbox.kill_processes()

    async def kill(self) -> bool:
        return await self.sandbox.kill()
