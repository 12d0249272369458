"""Programs over the SDK's one way to run them: a line for a login shell, with output decoded as text and only the leader killed.

So the line first puts back the environment that was asked for (a profile may have changed it), the program writes to files,
and what comes over the wire is base64 after a mark: bytes are exact, and what a profile prints is skipped. A program is ended
by the variable that all of its descendants inherit.
"""

from __future__ import annotations

import asyncio
import base64
import posixpath
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from rollyard.core.errors import PathError, SandboxError
from rollyard.core.ids import new_id
from rollyard.core.protocols import Command
from rollyard.core.sandbox import Exit
from rollyard.sandbox import shim
from rollyard.sandbox.e2b.faults import speaking

ROOT = "/tmp/.rollyard"
_CLEAN = (
    'for n in $(compgen -e); do unset "$n" 2>/dev/null; done; '
    'while IFS= read -r -d "" kv; do export "$kv" 2>/dev/null; done </proc/$$/environ; '
    ': "${PATH:=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"; export PATH; unset SHLVL OLDPWD; exec '
)
_RUN = """n=$1; d=$2; max=$3; cwd=$4; in=$5; shift 5
cd -- "$cwd" 2>/dev/null || { e=EACCES; [ -e "$cwd" ] || e=ENOENT; [ -e "$cwd" ] && [ ! -d "$cwd" ] && e=ENOTDIR
echo "$n cwd $e"; exit 0; }
mkdir -p "$d" || { echo "$n cwd ENOSPC"; exit 0; }
"$@" >"$d/out" 2>"$d/err" <"$in"; c=$?
echo "$n code $c $(wc -c <"$d/out") $(wc -c <"$d/err")"
head -c $max "$d/out" | base64; echo "$n"; head -c $max "$d/err" | base64; echo "$n"; rm -rf "$d"
"""
_PARTIAL = 'for f in out err; do head -c $2 "$1/$f" 2>/dev/null; printf "\\0%s\\0" "$3"; done; rm -rf "$1"'
_GRACE_S = 10.0
_LONGEST = 90_000  # of one word of a command line; longer ones go by a file


def argv_of(cmd: Command) -> list[str]:
    """A string is `/bin/sh -c`; a sequence is executed as it is."""
    argv = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else [str(part) for part in cmd]
    if not argv or any("\0" in part for part in argv):
        raise PathError(argv[0] if argv else "", "EINVAL", hint="a command needs a program, and no NUL in it")
    return argv


class Programs:
    """`box` is the SDK's own object for the sandbox."""

    def __init__(self, box: Any, *, key: str | None, workdir: str, user: str | None) -> None:
        self.id: str = box.sandbox_id
        self._box, self._key = box, key
        self._workdir, self._user = workdir, user

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
        mark, began = new_id("exec"), time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                return await self._run(
                    argv_of(cmd), mark, {**(env or {}), shim.MARK: mark}, cwd, user, stdin, max_output
                )
        except TimeoutError:
            await shim.kill_tree(self.plain, mark, user=user)
            out, err = await self._partial(mark, max_output, user)
            return Exit(
                exit_code=None, stdout=out, stderr=err, timed_out=True, signal=9, duration_s=time.monotonic() - began
            )
        except asyncio.CancelledError:
            with anyio.move_on_after(_GRACE_S, shield=True):
                await shim.kill_tree(self.plain, mark, user=user)
            raise

    async def plain(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float,
    ) -> Exit:
        """A short command of our own: without a mark of its own, and left to itself when cancelled."""
        try:
            async with asyncio.timeout(timeout):
                return await self._run(list(cmd), new_id("step"), env or {}, cwd, user, None, 64 * 2**20)
        except TimeoutError:
            raise SandboxError(f"sandbox {self.id} did not finish a step of its own in {timeout:g} s") from None

    async def script(self, script: str, *args: str, user: str | None = None, timeout: float = shim.STEP_S) -> Exit:
        return await self.plain(["/bin/sh", "-c", script, "rollyard", *args], user=user, timeout=timeout)

    async def _run(
        self,
        argv: list[str],
        name: str,
        env: Mapping[str, str],
        cwd: str | None,
        user: str | None,
        stdin: bytes | None,
        most: int,
    ) -> Exit:
        began, nonce, fed = time.monotonic(), secrets.token_hex(12), "/dev/null"
        if stdin is not None:
            fed = f"{ROOT}/x/{name}.in"
            with speaking(self.id, self._key):
                await self._box.files.write(fed, stdin)
        place = self._place(cwd)
        args = [nonce, f"{ROOT}/x/{name}", str(most), place, fed, *argv]
        handle = await self.start_line(["/bin/sh", "-c", _RUN, "rollyard", *args], env=env, user=user)
        try:
            with speaking(self.id, self._key):
                said = (await handle.wait()).stdout
        except asyncio.CancelledError:
            await handle.disconnect()
            raise
        except SandboxError as error:
            if "CommandExitException" in str(error):
                return Exit(exit_code=None, signal=9, lost=True, duration_s=time.monotonic() - began)
            raise
        return _parsed(said, nonce, place, time.monotonic() - began)

    async def start_line(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        user: str | None,
        stdin: bool = False,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
    ) -> Any:
        """The SDK's handle of a program in the environment that was asked for. No deadline: the server would put it on
        the program, and the default is a minute."""
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise PathError(name, "EINVAL", hint="this environment variable cannot be passed to a program")
        line = _CLEAN + shlex.join(argv)
        with speaking(self.id, self._key):
            if len(line.encode()) > _LONGEST:
                path = f"{ROOT}/x/{new_id('line')}"
                await self._box.files.write(path, line)
                line = f". {path}"
            return await self._box.commands.run(
                line,
                background=True,
                envs=dict(env),
                cwd="/",  # the sandbox's own working directory may have been removed
                user=user or self._user,
                stdin=stdin,
                timeout=0,
                **({"on_stdout": on_stdout, "on_stderr": on_stderr} if on_stdout else {}),
            )

    async def _partial(self, mark: str, most: int, user: str | None) -> tuple[bytes, bytes]:
        """What a program that was ended had said."""
        nonce = secrets.token_hex(12)
        done = await self.script(_PARTIAL, f"{ROOT}/x/{mark}", str(most), nonce, user=user)
        parts = done.stdout.split(f"\0{nonce}\0".encode())
        return (parts[0], parts[1]) if len(parts) > 1 else (b"", b"")

    def _place(self, cwd: str | None) -> str:
        path = posixpath.join(self._workdir, cwd or "")
        if "\0" in path:
            raise PathError(path, "EINVAL", hint="a path has no NUL")
        return path if path == "/" else path.rstrip("/") or "/"


def _parsed(said: str, nonce: str, place: str, took: float) -> Exit:
    """The answer after the mark; before it is whatever a profile printed."""
    _, found, rest = said.partition(f"{nonce} ")
    if not found:
        raise SandboxError(f"the sandbox's shell did not run the program: {said[-200:].strip()}")
    head, _, body = rest.partition("\n")
    words = head.split()
    if words[0] == "cwd":
        raise PathError(place, words[1], hint="the working directory")
    code, out_size, err_size = (int(word) for word in words[1:])
    out, err = (base64.b64decode(part) for part in body.split(nonce)[:2])
    return Exit(
        exit_code=code,
        stdout=out,
        stderr=err,
        signal=code - 128 if 128 < code < 160 else None,
        truncated=out_size > len(out) or err_size > len(err),
        duration_s=took,
    )
