"""Shells that remember: a command leaves its directory, variables and functions to the next one.

A shell is a job of the sandbox, fed through its standard input; a mark before and after each command says where its output is
and how it ended. Which job a session is stands in the plane's storage, so any replica feeds it, where the sandbox's backend lets
a second process write to a job. A command gets no input of its own. One that outlives its time takes its shell with it, since
its output could not be told from the next one's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from rollyard.core.errors import EnvError, PlaneInvalid, PlaneNotFound, SandboxGone
from rollyard.core.ids import new_id
from rollyard.core.protocols import Job, Sandbox
from rollyard.plane.service.typed_records import TypedRecords

_START_S = 30.0
_MAX_OUTPUT = 16 * 2**20
_NOTED = 2**18  # a shell's output that another replica may have to read again
_AT_HAND = 1000  # shells; others are found again


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    output: str
    exit_code: int


class RockShell(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is kept: its job, and up to where that one's output is known to be over and done with."""

    job_id: str
    offset: int = 0


class Shells:
    """Those of all sandboxes, by instance and session."""

    def __init__(self, records: TypedRecords[RockShell]) -> None:
        self._records = records
        self._shells: dict[tuple[str, str], Shell] = {}

    async def open(
        self,
        instance_id: str,
        name: str,
        sandbox: Sandbox,
        *,
        env: Mapping[str, str],
        user: str | None,
        sources: Sequence[str],
    ) -> None:
        made = RockShell(job_id=new_id("job"))
        if await self._is_open(instance_id, name, sandbox) or not await self._records.add(instance_id, name, made):
            raise PlaneInvalid(f"there is a session named {name}")
        try:
            job = await sandbox.start(
                ["bash", "--norc", "--noprofile"], env=env, user=user, stdin=True, job_id=made.job_id
            )
            shell = Shell(job, 0)
            await job.write(b"exec 2>&1\n")
            for path in sources:
                await shell.run(f"source '{path}'", timeout=_START_S)
        except BaseException:  # cancelled too: a session without a shell is none
            await asyncio.shield(self._records.drop(instance_id, name))
            raise
        self._keep(instance_id, name, shell)

    async def _is_open(self, instance_id: str, name: str, sandbox: Sandbox) -> bool:
        """One whose shell has ended, or whose server died before it began, makes room for another."""
        kept = await self._records.get(instance_id, name)
        if kept is None:
            return False
        with suppress(SandboxGone):
            if await (await sandbox.job(kept.value.job_id)).poll() is None:
                return True
        await self._forget(instance_id, name)
        return False

    async def run(self, instance_id: str, name: str, sandbox: Sandbox, command: str, *, timeout: float) -> CommandEnd:
        kept = await self._records.get(instance_id, name)
        if kept is None:
            raise PlaneNotFound(f"there is no session named {name}")
        shell = self._shells.get((instance_id, name))
        if shell is None or shell.job_id != kept.value.job_id:
            shell = await self._find(instance_id, name, sandbox, kept.value)
        try:
            done = await shell.run(command, timeout=timeout)
        except (TimeoutError, EnvError):
            await self._forget(instance_id, name)
            raise
        if shell.offset - kept.value.offset > _NOTED:  # it does no harm if another replica was first
            noted = RockShell(job_id=shell.job_id, offset=shell.offset)
            await self._records.write(self._records.change(kept, noted))
        return done

    async def close(self, instance_id: str, name: str, sandbox: Sandbox) -> None:
        kept = await self._records.get(instance_id, name)
        if kept is not None:
            shell = self._shells.get((instance_id, name)) or await self._find(instance_id, name, sandbox, kept.value)
            await self._forget(instance_id, name)
            await shell.close()

    async def _find(self, instance_id: str, name: str, sandbox: Sandbox, kept: RockShell) -> Shell:
        try:
            shell = Shell(await sandbox.job(kept.job_id), kept.offset)
        except SandboxGone as error:
            await self._forget(instance_id, name)
            raise PlaneNotFound(f"the shell of session {name} has ended") from error
        self._keep(instance_id, name, shell)
        return shell

    def _keep(self, instance_id: str, name: str, shell: Shell) -> None:
        if len(self._shells) >= _AT_HAND:
            self._shells.clear()
        self._shells[instance_id, name] = shell

    async def _forget(self, instance_id: str, name: str) -> None:
        self._shells.pop((instance_id, name), None)
        await self._records.drop(instance_id, name)


class Shell:
    """One as this replica sees it; `offset` is where the next command's output is looked for."""

    def __init__(self, job: Job, offset: int) -> None:
        self._job, self.offset = job, offset
        self._lock = asyncio.Lock()

    @property
    def job_id(self) -> str:
        return self._job.id

    async def run(self, command: str, *, timeout: float) -> CommandEnd:
        mark = secrets.token_hex(16)
        script = f"printf '{mark} begins\\n'\n{{\n{command}\n}} < /dev/null\nprintf '\\n{mark} %d\\n' $?\n"
        async with self._lock:
            try:
                async with asyncio.timeout(timeout):
                    await self._job.write(script.encode())
                    return await self._read_until(f"{mark} begins\n".encode(), f"\n{mark} ".encode())
            except TimeoutError:
                await self._job.kill()
                raise

    async def _read_until(self, begin: bytes, end: bytes) -> CommandEnd:
        held, begun = b"", False
        async for offset, data in self._job.stream(self.offset):
            self.offset = offset
            held += data
            if not begun:  # what commands of another replica have said
                _, found, after = held.partition(begin)
                begun, held = bool(found), after if found else held[-len(begin) :]
            before, found, after = held.partition(end)
            if begun and found and after.endswith(b"\n"):
                return CommandEnd(output=before.decode("utf-8", "backslashreplace").strip("\n"), exit_code=int(after))
            if len(held) > _MAX_OUTPUT:
                raise EnvError(f"the command wrote more than {_MAX_OUTPUT} bytes")
        raise EnvError("the shell has ended")

    async def close(self) -> None:
        await self._job.kill()
