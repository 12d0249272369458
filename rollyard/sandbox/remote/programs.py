"""Programs over a line of shell: every call is short and may be asked again, whatever becomes of its answer.

A program runs under the durable shim and is waited for with long polls. So no proxy's or provider's limit on one call ends it, an
answer that was lost is asked for again, and nothing runs twice. Output comes back as base64 after a mark: bytes are exact, and
what a profile prints is skipped.
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
from collections.abc import Mapping, Sequence

import anyio

from rollyard.core.errors import Error, PathError, SandboxError, SandboxInterrupted, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.protocols import Command
from rollyard.core.sandbox import Exit
from rollyard.sandbox import shim
from rollyard.sandbox.paths import ROOT, TREE_S
from rollyard.sandbox.remote.link import Link, Provider, left_alone, speaking
from rollyard.sandbox.retry import LOOKS, retrying

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


class Programs:
    def __init__(self, link: Link, provider: Provider, *, workdir: str) -> None:
        self.id = link.id
        self._link, self._provider, self._workdir = link, provider, workdir
        self._over: list[str] = []  # files of ours that are not needed any more

    async def exec(
        self,
        cmd: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
        max_output: int = 16 * 2**20,
    ) -> Exit:
        self._as_it_is(user)
        mark, began, place = new_id("exec"), time.monotonic(), self._place(cwd)
        argv = shim.argv_of(cmd)
        try:
            async with asyncio.timeout(timeout):
                if stdin is not None:
                    await self._put(f"{ROOT}/x/{mark}.in", stdin, None)
                    argv = ["/bin/sh", "-c", 'exec "$@" <"$0"', f"{ROOT}/x/{mark}.in", *argv]
                done = await shim.finish(
                    self.plain, argv, mark, env=checked(env), cwd=place, most=max_output, root=f"{ROOT}/x"
                )
        except TimeoutError:
            await shim.kill_tree(self.plain, mark)
            out, err = await shim.so_far(self.plain, mark, most=max_output, root=f"{ROOT}/x")
            done = Exit(
                exit_code=None, stdout=out, stderr=err, timed_out=True, signal=9, duration_s=time.monotonic() - began
            )
        except (asyncio.CancelledError, SandboxInterrupted):
            with anyio.move_on_after(_GRACE_S, shield=True), contextlib.suppress(Error):  # the first error is told
                await shim.kill_tree(self.plain, mark)
            raise
        await self._not_needed(mark, f"{mark}.in")
        return done

    async def plain(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float,
    ) -> Exit:
        """A short command of our own, once: left to itself when it is cancelled or its answer is lost."""
        self._as_it_is(user)
        began, nonce, place = time.monotonic(), secrets.token_hex(12), self._place(cwd)
        line = shlex.join(["/bin/sh", "-c", _PLAIN, "rollyard", nonce, place, *cmd])
        if len(line.encode()) > _LONGEST:
            path = f"{ROOT}/x/{new_id('line')}"
            await self._put(path, line.encode(), None)
            line = f". {path}; rm -f {path}"
        try:
            async with asyncio.timeout(timeout):
                with speaking(self._provider, self.id):
                    running = self._link.run(line, env=dict(env or {}), timeout=timeout + _SPARE_S)
                    said = await left_alone(running)
        except TimeoutError:
            raise SandboxInterrupted(f"sandbox {self.id} did not finish a step of its own in {timeout:g} s") from None
        return _parsed(said, nonce, place, time.monotonic() - began)

    async def script(self, script: str, *args: str, user: str | None = None, timeout: float = shim.STEP_S) -> Exit:
        return await self.plain(["/bin/sh", "-c", script, "rollyard", *args], cwd="/", user=user, timeout=timeout)

    async def say(self, script: str, *args: str, timeout: float = shim.STEP_S) -> Exit:
        """A script that does no harm when it is run twice."""
        return await retrying(lambda: self.script(script, *args, timeout=timeout), LOOKS, idempotent=True)

    async def _put(self, place: str, data: bytes, user: str | None) -> None:
        self._as_it_is(user)

        async def put() -> None:
            with speaking(self._provider, self.id):
                async with asyncio.timeout(TREE_S):
                    await self._link.put(place, data)

        await retrying(put, LOOKS, idempotent=True)

    async def _not_needed(self, *names: str) -> None:
        """Files of ours that may go; many go at once."""
        self._over += names
        if len(self._over) >= _SWEEP:
            over, self._over = self._over, []
            with contextlib.suppress(SandboxInterrupted):  # they cost room and nothing else
                await self.script('cd "$1" && shift && rm -rf "$@"', f"{ROOT}/x", *over)

    def _as_it_is(self, user: str | None) -> None:
        if user is not None:
            raise Unsupported(f"sandbox {self.id} runs programs as one user", hint="leave `user` out")

    def _place(self, cwd: str | None) -> str:
        path = posixpath.join(self._workdir, cwd or "")
        if "\0" in path:
            raise PathError(path, "EINVAL", hint="a path has no NUL")
        return path if path == "/" else path.rstrip("/") or "/"


def checked(env: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise PathError(name, "EINVAL", hint="this environment variable cannot be passed to a program")
    return dict(env or {})


def _parsed(said: str, nonce: str, place: str, took: float) -> Exit:
    """The answer after the mark; before it is whatever a profile printed."""
    _, found, rest = said.replace("\r\n", "\n").partition(f"{nonce}\n")
    if not found:
        raise SandboxError(f"the sandbox's shell did not run the program: {said[-200:].strip()}")
    if rest.startswith(f"{nonce} "):
        raise PathError(place, rest.split()[1], hint="the working directory")
    try:
        out, told, _ = rest.split(f"{nonce}\n")
        err, _, code = base64.b64decode(told).rpartition(b"\n")
        return Exit(
            exit_code=int(code),
            stdout=base64.b64decode(out),
            stderr=err,
            signal=int(code) - 128 if 128 < int(code) < 160 else None,
            duration_s=took,
        )
    except (ValueError, binascii.Error):
        raise SandboxInterrupted("what a program said did not come through whole") from None
