"""Running a judge's program once, whatever the connection does: a job with a fixed id, waited for across drops.

Starting it again under the same id finds the first one (or, on a backend that cannot, is refused by a lock directory), so tests
never run twice. Reading a result is idempotent and is retried.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollyard.core.errors import SandboxError, SandboxInterrupted, SandboxUnavailable, StreamDropped
from rollyard.core.ids import new_id
from rollyard.core.protocols import Job, Sandbox
from rollyard.core.sandbox import Exit
from rollyard.tasks.verifiers.sandbox import LOGS

T = TypeVar("T")
_RUN_ALREADY = 97
_TRIES = 6
_AGAIN = (StreamDropped, SandboxInterrupted, SandboxUnavailable)


async def run_once(sandbox: Sandbox, script: str) -> Exit:
    """The end of `script`, a shell text. The caller bounds the time; its process tree is dead afterwards."""
    job_id = new_id("verify")
    lock = shlex.quote(f"{LOGS}/.{job_id}")
    guarded = f"mkdir {lock} 2>/dev/null || exit {_RUN_ALREADY}\n{script}"
    job = await retry_dropped(lambda: sandbox.start(guarded, job_id=job_id))
    try:
        while True:
            try:
                done = await job.wait()
            except (StreamDropped, SandboxInterrupted):
                job = await retry_dropped(lambda: sandbox.job(job_id))
                continue
            if done.exit_code != _RUN_ALREADY:
                return done
            first = await retry_dropped(lambda: sandbox.job(job_id))
            if await first.poll() == _RUN_ALREADY:
                raise SandboxInterrupted("the tests ran, but their end was lost with the connection")
            job = first
    finally:
        with anyio.move_on_after(10, shield=True):
            await _end(job)


async def _end(job: Job) -> None:
    try:
        await job.kill()
    except SandboxError:
        pass  # it is over, or its sandbox is; the sandbox is closed after judging


async def retry_dropped(act: Callable[[], Awaitable[T]], *, tries: int = _TRIES) -> T:
    """Repeat something idempotent while the connection breaks."""
    for attempt in range(tries - 1):
        try:
            return await act()
        except _AGAIN:
            await anyio.sleep(min(5.0, 0.1 * 2**attempt))
    return await act()
