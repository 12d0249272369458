"""Programs over the SDK's one way to run them: a line for a login shell, with output decoded as text and only the leader killed.

So the line first puts back the environment that was asked for (a profile may have changed it), the program writes to files,
and what comes over the wire is base64 after a mark: bytes are exact, and what a profile prints is skipped. A program is ended
by the variable that all of its descendants inherit.

Nobody repeats what was said while a connection was down. So the files of an `exec` stay until the next one, and after a dropped
connection they are asked for: the program is never started again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from rollyard.core.errors import Error, PathError, SandboxError, SandboxInterrupted
from rollyard.core.ids import new_id
from rollyard.core.protocols import Command
from rollyard.core.sandbox import Exit
from rollyard.sandbox import shim
from rollyard.sandbox.e2b.faults import speaking
from rollyard.sandbox.paths import ROOT
from rollyard.sandbox.retry import LOOKS, retrying

_CLEAN = (
    'for n in $(compgen -e); do unset "$n" 2>/dev/null; done; '
    'while IFS= read -r -d "" kv; do export "$kv" 2>/dev/null; done </proc/$$/environ; '
    ': "${PATH:=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"; export PATH; unset SHLVL OLDPWD; exec '
)
_TELL = """tell() { echo "$1 code $4 $(wc -c <"$2/out") $(wc -c <"$2/err")"
head -c $3 "$2/out" | base64; echo "$1"; head -c $3 "$2/err" | base64; echo "$1"; }
"""
_RUN = (
    _TELL
    + """n=$1; d=$2; max=$3; cwd=$4; in=$5; keep=$6; old=$7; shift 7
for o in $old; do rm -rf "${d%/*}/$o"; done
cd -- "$cwd" 2>/dev/null || { e=EACCES; [ -e "$cwd" ] || e=ENOENT; [ -e "$cwd" ] && [ ! -d "$cwd" ] && e=ENOTDIR
echo "$n cwd $e"; exit 0; }
mkdir -p -m 700 "$d" || { echo "$n cwd ENOSPC"; exit 0; }
"$@" >"$d/out" 2>"$d/err" <"$in"; c=$?
echo $c >"$d/code.new"; mv "$d/code.new" "$d/code"; tell "$n" "$d" "$max" "$c"
[ "$keep" = 1 ] || rm -rf "$d"
"""
)
_AGAIN = (
    _TELL
    + f"""n=$1; d=$2; max=$3; mark=$4; at=0
while [ ! -f "$d/code" ] && [ $at -lt 100 ]; do
at=$((at+1)); [ $((at % 10)) = 0 ] && {{ grep -qs "{shim.MARK}=$mark" /proc/[0-9]*/environ || break; }}; sleep 0.2; done
[ -f "$d/code" ] && {{ tell "$n" "$d" "$max" "$(cat "$d/code")"; exit 0; }}
grep -qs "{shim.MARK}=$mark" /proc/[0-9]*/environ && {{ echo "$n running"; exit 0; }}
[ -d "$d" ] && echo "$n lost" || echo "$n never"
"""
)
_PARTIAL = 'for f in out err; do head -c $2 "$1/$f" 2>/dev/null; printf "\\0%s\\0" "$3"; done; rm -rf "$1"'
_GRACE_S = 10.0
_LONGEST = 90_000  # of one word of a command line; longer ones go by a file


class Programs:
    """`box` is the SDK's own object for the sandbox."""

    def __init__(self, box: Any, *, key: str | None, workdir: str, user: str | None) -> None:
        self.id: str = box.sandbox_id
        self._box, self._key = box, key
        self._workdir, self._user = workdir, user
        self._over: dict[str, list[str]] = {}  # by user: programs whose files are not needed any more

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
                return await self._whatever_happens(shim.argv_of(cmd), mark, env or {}, cwd, user, stdin, max_output)
        except TimeoutError:
            await shim.kill_tree(self.plain, mark, user=user)
            out, err = await self._partial(mark, max_output, user)
            return Exit(
                exit_code=None, stdout=out, stderr=err, timed_out=True, signal=9, duration_s=time.monotonic() - began
            )
        except (asyncio.CancelledError, SandboxInterrupted):
            with anyio.move_on_after(_GRACE_S, shield=True), contextlib.suppress(Error):  # the first error is told
                await shim.kill_tree(self.plain, mark, user=user)
            raise

    async def _whatever_happens(
        self,
        argv: list[str],
        mark: str,
        env: Mapping[str, str],
        cwd: str | None,
        user: str | None,
        stdin: bytes | None,
        most: int,
    ) -> Exit:
        began = time.monotonic()
        try:
            done = await self._run(argv, mark, {**env, shim.MARK: mark}, cwd, user, stdin, most, keep=True)
        except SandboxInterrupted as dropped:
            done = await self._asked_again(mark, user, most, began, dropped)
        self._over.setdefault(user or "", []).append(mark)
        return done

    async def _asked_again(
        self, mark: str, user: str | None, most: int, began: float, dropped: SandboxInterrupted
    ) -> Exit:
        """How a program ended whose connection was lost. One that was never started is told as the drop it was."""
        while True:
            nonce = secrets.token_hex(12)
            args = [nonce, f"{ROOT}/x/{mark}", str(most), mark]
            said = await retrying(partial(self._said, _AGAIN, args, user), LOOKS, idempotent=True)
            words = said.partition(f"{nonce} ")[2].split()
            if words[:1] == ["running"]:
                continue
            if words[:1] == ["lost"]:
                return Exit(exit_code=None, signal=9, lost=True, duration_s=time.monotonic() - began)
            if words[:1] == ["never"]:
                raise dropped
            return _parsed(said, nonce, "", most, time.monotonic() - began)

    async def _said(self, script: str, args: Sequence[str], user: str | None) -> str:
        handle = await self.start_line(["/bin/sh", "-c", script, "rollyard", *args], env={}, user=user)
        return await self._heard(handle)

    async def _heard(self, handle: Any) -> str:
        try:
            with speaking(self.id, self._key):
                return str((await handle.wait()).stdout)
        except asyncio.CancelledError:
            await handle.disconnect()
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
        *,
        keep: bool = False,
    ) -> Exit:
        began, nonce, fed = time.monotonic(), secrets.token_hex(12), "/dev/null"
        if stdin is not None:
            fed = f"{ROOT}/x/{name}.in"
            with speaking(self.id, self._key):
                await self._box.files.write(fed, stdin)
        place, over = self._place(cwd), self._over.pop(user or "", [])
        args = [nonce, f"{ROOT}/x/{name}", str(most), place, fed, "1" if keep else "0", " ".join(over), *argv]
        handle = await self.start_line(["/bin/sh", "-c", _RUN, "rollyard", *args], env=env, user=user)
        try:
            said = await self._heard(handle)
        except SandboxError as error:
            if "CommandExitException" in str(error):
                return Exit(exit_code=None, signal=9, lost=True, duration_s=time.monotonic() - began)
            raise
        return _parsed(said, nonce, place, most, time.monotonic() - began)

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
        """The SDK's handle of a program in the environment that was asked for. No deadline of the SDK's: the server would
        put it on the program, and the default is a minute."""
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise PathError(name, "EINVAL", hint="this environment variable cannot be passed to a program")
        line = _CLEAN + shlex.join(argv)
        if len(line.encode()) > _LONGEST:
            path = f"{ROOT}/x/{new_id('line')}"
            with speaking(self.id, self._key):
                await self._box.files.write(path, line)
            line = f". {path}"
        try:
            with speaking(self.id, self._key):
                async with asyncio.timeout(shim.STEP_S):
                    return await self._box.commands.run(
                        line,
                        background=True,
                        envs=dict(env),
                        cwd="/",  # the sandbox's own working directory may have been removed
                        user=user or self._user,
                        stdin=stdin,
                        timeout=0,
                        request_timeout=0,
                        **({"on_stdout": on_stdout, "on_stderr": on_stderr} if on_stdout else {}),
                    )
        except TimeoutError:
            raise SandboxInterrupted(f"sandbox {self.id} did not say that a program was started") from None

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


def _parsed(said: str, nonce: str, place: str, most: int, took: float) -> Exit:
    """The answer after the mark; before it is whatever a profile printed."""
    _, found, rest = said.partition(f"{nonce} ")
    if not found:
        raise SandboxError(f"the sandbox's shell did not run the program: {said[-200:].strip()}")
    head, _, body = rest.partition("\n")
    words = head.split()
    if words[0] == "cwd":
        raise PathError(place, words[1], hint="the working directory")
    try:
        code, out_size, err_size = (int(word) for word in words[1:])
        out, err, _ = (base64.b64decode(part) for part in body.split(nonce))
        if len(out) < min(out_size, most) or len(err) < min(err_size, most):
            raise ValueError("too short")
    except ValueError:
        raise SandboxInterrupted("what a program said did not come through whole") from None
    return Exit(
        exit_code=code,
        stdout=out,
        stderr=err,
        signal=code - 128 if 128 < code < 160 else None,
        truncated=out_size > len(out) or err_size > len(err),
        duration_s=took,
    )
