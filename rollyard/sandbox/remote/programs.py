"""Programs over a line of shell: every call is short and may be asked again, whatever becomes of its answer.

A program runs under the durable shim and is waited for with long polls, or by one call where the provider streams. So no limit
of a proxy or provider on one call ends it, an answer that was lost is asked for again, and nothing runs twice. Output comes back
as base64 after a mark: bytes are exact, and what a profile prints is skipped.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import posixpath
import secrets
import shlex
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from rollyard.core.errors import Error, PathError, SandboxError, SandboxInterrupted
from rollyard.core.ids import new_id
from rollyard.core.program import Program, ProgramCalls
from rollyard.core.sandbox import Exit
from rollyard.sandbox import job_shim
from rollyard.sandbox.paths import ROOT, TREE_S
from rollyard.sandbox.remote.errors import gone_error, translate_errors
from rollyard.sandbox.remote.provider import SandboxLink, SandboxProvider, StreamingLink
from rollyard.sandbox.retry import LOOKS, retry_open

T = TypeVar("T")
# stdout goes through base64 as it comes; stderr, and after it the exit code, are kept in a variable and told at the end.
_PLAIN = """n=$1; cwd=$2; shift 2; echo "$n"
cd -- "$cwd" 2>/dev/null || { e=EACCES; [ -e "$cwd" ] || e=ENOENT; [ -e "$cwd" ] && [ ! -d "$cwd" ] && e=ENOTDIR
echo "$n $e"; exit 0; }
exec 3>&1
said=$( { { "$@" 3>&-; printf '\\n%s' "$?" >&2; } | base64 >&3; } 2>&1 )
echo "$n"; printf %s "$said" | base64; echo "$n"
"""
_GRACE_S = 10.0
_SPARE_S = 10.0  # a provider's own deadline comes after ours
_LONGEST = 60_000  # of a line; longer ones go by a file
_SWEEP = 32


class RemotePrograms(ProgramCalls):
    def __init__(self, link: SandboxLink, provider: SandboxProvider, *, workdir: str) -> None:
        self.id = link.id
        self._link, self._provider, self._workdir = link, provider, workdir
        self._dead = False
        self._unneeded: dict[str | None, list[str]] = {}  # by user: files of ours that may go

    def _link_of(self, user: str | None) -> SandboxLink:
        if self._dead:
            raise gone_error(self.id)
        return self._link if user is None else self._link.as_user(user)

    async def _exec(self, program: Program, timeout: float) -> Exit:
        mark, began, place = new_id("exec"), time.monotonic(), self._place(program.cwd)
        argv, user, most = program.argv, program.user, program.output_limit
        run, root = partial(self.exec_plain, user=user), f"{ROOT}/x"
        # A provider that streams lets one call stand for as long as the program runs; our own deadline comes first.
        one_call_s = timeout + _SPARE_S if isinstance(self._link, StreamingLink) else None
        try:
            async with asyncio.timeout(timeout):
                if program.input is not None:
                    await self._put(f"{root}/{mark}.in", program.input, user)
                    argv = ("/bin/sh", "-c", 'exec "$@" <"$0"', f"{root}/{mark}.in", *argv)
                done = await job_shim.finish(
                    run,
                    argv,
                    mark,
                    env=program.env,
                    cwd=place,
                    most=most,
                    root=root,
                    one_call_s=one_call_s,
                )
        except TimeoutError:
            await job_shim.kill_tree(run, mark, user=user)
            out, err = await job_shim.so_far(run, mark, most=most, root=root)
            done = Exit(
                exit_code=None, stdout=out, stderr=err, timed_out=True, signal=9, duration_s=time.monotonic() - began
            )
        except (asyncio.CancelledError, SandboxInterrupted):
            with anyio.move_on_after(_GRACE_S, shield=True), contextlib.suppress(Error):  # the first error is reported
                await job_shim.kill_tree(run, mark, user=user)
            raise
        await self._discard(mark, f"{mark}.in", user=user)
        return done

    async def exec_plain(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float,
    ) -> Exit:
        """A short command of our own, once: left to itself when it is cancelled or its answer is lost."""
        began, nonce, place = time.monotonic(), secrets.token_hex(12), self._place(cwd)
        line = await self._fit_line(["/bin/sh", "-c", _PLAIN, "rollyard", nonce, place, *cmd], user)
        try:
            async with asyncio.timeout(timeout):
                with translate_errors(self._provider, self.id):
                    running = self._link_of(user).run(line, env=dict(env or {}), timeout=timeout + _SPARE_S)
                    said = await _run_as_task(running)
        except TimeoutError:
            raise SandboxInterrupted(f"sandbox {self.id} did not finish a step of its own in {timeout:g} s") from None
        return _parse_answer(said, nonce, place, time.monotonic() - began)

    async def _fit_line(self, argv: Sequence[str], user: str | None) -> str:
        """One simple command for a shell, of a length that any provider takes."""
        line = shlex.join(argv)
        if len(line.encode()) <= _LONGEST:
            return line
        path = f"{ROOT}/x/{new_id('line')}"
        await self._put(path, f'rm -f "$0"; exec {line}'.encode(), user)
        return f"/bin/sh {path}"

    async def script(self, script: str, *args: str, user: str | None = None, timeout: float = job_shim.STEP_S) -> Exit:
        return await self.exec_plain(["/bin/sh", "-c", script, "rollyard", *args], cwd="/", user=user, timeout=timeout)

    async def repeat_script(self, script: str, *args: str, timeout: float = job_shim.STEP_S) -> Exit:
        """A script that does no harm when it is run twice."""
        return await retry_open(lambda: self.script(script, *args, timeout=timeout), LOOKS, idempotent=True)

    async def _put(self, place: str, data: bytes, user: str | None) -> None:
        async def put() -> None:
            with translate_errors(self._provider, self.id):
                async with asyncio.timeout(TREE_S):
                    await self._link_of(user).put(place, data)

        await retry_open(put, LOOKS, idempotent=True)

    async def _discard(self, *names: str, user: str | None) -> None:
        """Files of ours that may go; many go at once, by the user who made them."""
        unneeded = self._unneeded.setdefault(user, [])
        unneeded += names
        if len(unneeded) >= _SWEEP:
            del self._unneeded[user]
            with contextlib.suppress(SandboxInterrupted):  # they cost room and nothing else
                await self.script('cd "$1" && shift && rm -rf "$@"', f"{ROOT}/x", *unneeded, user=user)

    def _place(self, cwd: str | None) -> str:
        path = posixpath.join(self._workdir, cwd or "")
        if "\0" in path:
            raise PathError(path, "EINVAL", hint="a path has no NUL")
        return path if path == "/" else path.rstrip("/") or "/"


async def _run_as_task(call: Coroutine[Any, Any, T]) -> T:
    """A call of an SDK, as a task of its own: some turn a cancellation into an error, and who cancelled would not see it."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its failure has no reader any more
        task.cancel()
        raise


def _parse_answer(said: str, nonce: str, place: str, took: float) -> Exit:
    """The answer after the mark; before it is whatever a profile printed."""
    _, found, rest = said.replace("\r\n", "\n").partition(f"{nonce}\n")
    if not found:
        raise SandboxError(f"the sandbox's shell did not run the program: {said[-200:].strip()}")
    if rest.startswith(f"{nonce} "):
        raise PathError(place, rest.split()[1], hint="the working directory")
    try:
        out, encoded, _ = rest.split(f"{nonce}\n")
        err, _, code = base64.b64decode(encoded).rpartition(b"\n")
        return Exit(
            exit_code=int(code),
            stdout=base64.b64decode(out),
            stderr=err,
            signal=int(code) - 128 if 128 < int(code) < 160 else None,
            duration_s=took,
        )
    except (ValueError, binascii.Error):
        raise SandboxInterrupted("what a program said did not come through whole") from None
