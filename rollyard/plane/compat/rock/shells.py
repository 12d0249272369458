"""Shells that remember: a command leaves its directory, variables and functions to the next one.

A shell is a job of the sandbox, fed through its standard input; a marker after each command says where its output ends and how it
ended. A command gets no input of its own. One that outlives its time takes its shell with it, since nobody could tell its output
from the next one's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from rollyard.core.errors import EnvError
from rollyard.core.protocols import Job, Sandbox

_START_S = 30.0
_MAX_OUTPUT = 16 * 2**20


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    output: str
    exit_code: int


class Shell:
    def __init__(self, job: Job) -> None:
        self._job, self._offset = job, 0
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, sandbox: Sandbox, *, env: Mapping[str, str], user: str | None, sources: Sequence[str]) -> Shell:
        job = await sandbox.start(["bash", "--norc", "--noprofile"], env=env, user=user, stdin=True)
        shell = cls(job)
        await job.write(b"exec 2>&1\n")
        for path in sources:
            await shell.run(f"source '{path}'", timeout=_START_S)
        return shell

    async def run(self, command: str, *, timeout: float) -> CommandEnd:
        mark = secrets.token_hex(16)
        async with self._lock:
            try:
                async with asyncio.timeout(timeout):
                    await self._job.write(f"{{\n{command}\n}} < /dev/null\nprintf '\\n{mark} %d\\n' $?\n".encode())
                    return await self._until(f"\n{mark} ".encode())
            except TimeoutError:
                await self._job.kill()
                raise

    async def _until(self, mark: bytes) -> CommandEnd:
        held = b""
        async for offset, data in self._job.stream(self._offset):
            self._offset = offset
            held += data
            before, found, after = held.partition(mark)
            if found and after.endswith(b"\n"):
                return CommandEnd(output=before.decode("utf-8", "backslashreplace").strip("\n"), exit_code=int(after))
            if len(held) > _MAX_OUTPUT:
                raise EnvError(f"the command wrote more than {_MAX_OUTPUT} bytes")
        raise EnvError("the shell has ended")

    async def close(self) -> None:
        await self._job.kill()
