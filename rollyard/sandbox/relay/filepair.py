"""The relay's pipe where a program has no stdin: two files in the sandbox that only grow, and long polls.

The host appends frames to `in` and reads `out` from an offset; the program inside does the reverse. Two fifos are bells: `call`
wakes the program, `bell` the poll that waits inside the sandbox, so neither side looks at a clock. A poll opens its bell before
it looks at the size, so no ring is missed; the program rings every five seconds by itself, so no poll stands for long.

What both sides have taken is given back to the disk in steps, as a hole at the file's beginning: offsets stay what they are. It
takes `fallocate` in the image and a file system with holes; without them the files only grow.

An append names the offset it belongs at, so one whose answer was lost is asked again and lands once. Small ones go in the
command itself, large ones by a file.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from rollyard.core.errors import SandboxError, SandboxGone
from rollyard.core.sandbox import Exit

_START = """d=$1; shift; mkdir -p -m 700 "$d" || exit 73
[ -p "$d/bell" ] || mkfifo "$d/bell" "$d/call" || exit 73
echo >"$d/alive"; [ -f "$d/out" ] && exit 0; : >"$d/in"; : >"$d/out"
end='echo $$ >"$0/pid"; "$@" </dev/null >/dev/null 2>"$0/log"; echo "ended with $?" >>"$0/log"; : >"$0/over"; echo 1<>"$0/bell"'
if command -v setsid >/dev/null 2>&1; then setsid sh -c "$end" "$d" "$@" </dev/null >/dev/null 2>&1 &
else sh -c "$end" "$d" "$@" </dev/null >/dev/null 2>&1 & fi
"""
# The first line says whether it is over and how much lies there; then what lies there.
_POLL = """d=$1; echo >"$d/alive" || exit 74; exec 4<>"$d/bell"
[ -f "$d/pid" ] && read -r p <"$d/pid" && { kill -0 "$p" 2>/dev/null || : >"$d/over"; }
[ $4 = 0 ] || fallocate -p -o 0 -l $4 "$d/out" 2>/dev/null
[ $(($(wc -c <"$d/out"))) -gt $2 ] || [ -f "$d/over" ] || read -r _ <&4
o=live; [ -f "$d/over" ] && o=over; echo $o; tail -c +$(($2+1)) "$d/out" | head -c $3
"""
_APPEND = """d=$1; s=$(($(wc -c <"$d/in"))) || exit 74; [ $s = $3 ] && exit 0; [ $s = $2 ] || exit 75
if [ -f "$d/taken" ]; then read -r t <"$d/taken"; rm -f "$d/taken"; fallocate -p -o 0 -l $t "$d/in" 2>/dev/null; fi
if [ -n "$4" ]; then cat <"$4"; else printf %s "$5" | base64 -d; fi >>"$d/in" && echo 1<>"$d/call"
"""
_LOG = 'tail -c 4096 "$1/log" 2>/dev/null; exit 0'
_CLOSE = 'rm -f "$1/in" && echo 1<>"$1/call"; : >"$1/over"; echo 1<>"$1/bell"; sleep 0.3; rm -rf "$1"'
CHUNK = 2**20
FREED = 16 * 2**20  # the step in which the disk gets back what was taken, on both sides
INLINE = 24_000
HELD = 2**20  # what is written and not yet taken, before a writer has to wait
POLL_S = 12.0  # the program rings every five seconds: one that does not is looked at again, and may be gone
_QUICK_S = 30.0


class RunScript(Protocol):
    """Runs a script in the sandbox, again when its answer is lost: all of the above may be repeated."""

    async def __call__(self, script: str, *args: str, timeout: float) -> Exit: ...


class HostFilePair:
    """`place` is a directory for it in the sandbox, `put` makes a file there."""

    def __init__(
        self, run_script: RunScript, put: Callable[[str, bytes], Awaitable[None]], place: str, *, poll_s: float = POLL_S
    ) -> None:
        self._run_script, self._put, self._place, self._poll_s = run_script, put, place, poll_s
        self._buffer = bytearray()
        self._sent = 0
        self._filled, self._drained = asyncio.Event(), asyncio.Event()
        self._appending: asyncio.Task[None] | None = None
        self._broken: SandboxError | None = None
        self._parts = 0

    async def start(self, argv: Sequence[str]) -> None:
        """`argv` is the relay's program; it gets the paths of the files."""
        done = await self._run_script(_START, self._place, *argv, f"files:{self._place}", timeout=_QUICK_S)
        if not done.ok:
            raise SandboxError(f"the relay could not be started: {done.text[-300:].strip()}")
        self._appending = asyncio.create_task(self._append(), name="rollyard-relay-append")

    async def output(self) -> AsyncIterator[bytes]:
        """What the program says, until it is over and all of it was read."""
        offset = freed = 0
        while True:
            if offset - freed >= FREED:
                freed = offset
            done = await self._run_script(_POLL, self._place, str(offset), str(CHUNK), str(freed), timeout=self._poll_s)
            if not done.ok:
                raise SandboxGone(f"the relay's files are gone: {done.text[-200:].strip()}")
            state, _, data = done.stdout.partition(b"\n")
            if data:
                offset += len(data)
                yield data
            elif state == b"over":
                return

    async def write(self, data: bytes) -> None:
        """Returns when there is room for it: what was written together is sent together."""
        if self._broken is not None:
            raise self._broken
        self._buffer += data
        self._filled.set()
        while len(self._buffer) > HELD and self._broken is None:
            self._drained.clear()
            await self._drained.wait()

    async def _append(self) -> None:
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._buffer:
                    data = bytes(self._buffer[: 8 * HELD])
                    await self._append_piece(data)
                    del self._buffer[: len(data)]
                    self._drained.set()
        except SandboxError as error:
            self._broken = error
            self._drained.set()

    async def _append_piece(self, data: bytes) -> None:
        end, carried, given = self._sent + len(data), "", base64.b64encode(data).decode()
        if len(data) > INLINE:
            self._parts += 1
            carried, given = f"{self._place}/part{self._parts % 2}", ""
            await self._put(carried, data)
        done = await self._run_script(_APPEND, self._place, str(self._sent), str(end), carried, given, timeout=_QUICK_S)
        if not done.ok:
            raise SandboxGone(f"the relay does not take what is sent to it: exit code {done.exit_code}")
        self._sent = end

    async def log(self) -> bytes:
        return (await self._run_script(_LOG, self._place, timeout=_QUICK_S)).stdout

    async def aclose(self) -> None:
        """Ends the program and removes the files."""
        if self._appending is not None:
            self._appending.cancel()
        await self._run_script(_CLOSE, self._place, timeout=_QUICK_S)
