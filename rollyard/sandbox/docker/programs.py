"""Programs in a container: one engine exec each, under two lines of shell that check the working directory.

The engine can start a program and tell its end, but cannot end one. So every program carries a mark in its environment that
its descendants inherit, and what is to be ended is found by it. The engine keeps a connection open while a stray child holds
stdout; whether the program itself has ended is therefore asked as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from rollyard.core.errors import PathError, SandboxError, SandboxGone, SandboxInterrupted
from rollyard.core.ids import new_id
from rollyard.core.program import Program, ProgramCalls
from rollyard.core.sandbox import Exit
from rollyard.sandbox import job_shim
from rollyard.sandbox.docker.container import Identity
from rollyard.sandbox.docker.engine import DockerEngine, EngineRefused, Stream
from rollyard.sandbox.docker.faults import is_gone, translate_faults

ROOT = "0:0"
_ENTER = (
    'n=$1; d=$2; shift 2; cd -- "$d" 2>/dev/null || { e=EACCES; [ -e "$d" ] || e=ENOENT; '
    '[ -e "$d" ] && [ ! -d "$d" ] && e=ENOTDIR; echo "$n $e" >&2; exit 125; }; exec "$@"'
)
_OOM = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
_GRACE_S = 5.0
_LOOK_S = 0.25
_LATE_S = 10.0
_CUT_OFF = 126


class Output:
    """What a program says, up to a limit for each of its streams."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts = {1: bytearray(), 2: bytearray()}
        self.truncated = False

    def take(self, stream: int, data: bytes) -> None:
        kept = self._parts[2 if stream == 2 else 1]
        room = self._limit - len(kept)
        kept += data[:room]
        self.truncated = self.truncated or len(data) > room

    @property
    def stdout(self) -> bytes:
        return bytes(self._parts[1])

    @property
    def stderr(self) -> bytes:
        return bytes(self._parts[2])


class DockerPrograms(ProgramCalls):
    """The part of a sandbox that runs programs. `env` is the spec's environment."""

    def __init__(self, engine: DockerEngine, container: str, who: Identity, env: Mapping[str, str]) -> None:
        self.id = who.id
        self._engine, self._container, self._who, self._env = engine, container, who, env
        self._oom_seen = 0

    async def _exec(self, program: Program, timeout: float) -> Exit:
        mark = new_id("exec")
        started, output, nonce = time.monotonic(), Output(program.output_limit), secrets.token_hex(8)
        user = program.user or self._who.user
        merged = {**self._env, **program.env, job_shim.MARK: mark}
        place = self._place(program.cwd)
        argv = ["/bin/sh", "-c", _ENTER, "rollyard", nonce, place, *program.argv]
        exec_id = await self._create(argv, merged, user, stdin=program.input is not None)
        try:
            async with asyncio.timeout(timeout):
                code = await self._run(exec_id, output, program.input)
        except TimeoutError:
            await self._end(mark, user)
            return Exit(
                exit_code=None, stdout=output.stdout, stderr=output.stderr, timed_out=True, signal=9,
                truncated=output.truncated, duration_s=time.monotonic() - started,
            )  # fmt: skip
        except (asyncio.CancelledError, SandboxInterrupted):
            with anyio.move_on_after(_GRACE_S, shield=True), contextlib.suppress(SandboxError):
                # The first error is reported
                await self._end(mark, user)
            raise
        if code == 125 and output.stderr.startswith(nonce.encode()):
            raise PathError(place, output.stderr.split()[1].decode(), hint="the working directory")
        return Exit(
            exit_code=code,
            stdout=output.stdout,
            stderr=output.stderr,
            signal=code - 128 if 128 < code < 160 else None,
            oom=code == 137 and await self._oom(),
            truncated=output.truncated,
            duration_s=time.monotonic() - started,
        )

    async def script(
        self, script: str, *args: str, stdin: bytes | None = None, timeout: float = job_shim.STEP_S
    ) -> Exit:
        """A short script of our own, as root."""
        return await self.exec_plain(["/bin/sh", "-c", script, "rollyard", *args], stdin=stdin, timeout=timeout)

    async def exec_plain(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
    ) -> Exit:
        """A short command of our own: no mark, no environment but what is given, and left to itself when cancelled."""
        argv, output = list(cmd), Output(64 * 2**20)
        if cwd is not None:
            argv = ["/bin/sh", "-c", _ENTER, "rollyard", "-", self._place(cwd), *argv]
        exec_id = await self._create(argv, env or {}, user or ROOT, stdin=stdin is not None)
        try:
            async with asyncio.timeout(timeout):
                code = await self._run(exec_id, output, stdin)
        except TimeoutError:
            raise SandboxError(f"sandbox {self.id} did not finish a step of its own in {timeout:g} s") from None
        if code == 125 and cwd is not None and output.stderr.startswith(b"- E"):
            raise PathError(self._place(cwd), output.stderr.split()[1].decode(), hint="the working directory")
        return Exit(exit_code=code, stdout=output.stdout, stderr=output.stderr)

    async def attach(self, argv: Sequence[str], *, env: Mapping[str, str], user: str) -> tuple[str, Stream]:
        """A program whose stdin and output are the caller's."""
        exec_id = await self._create(list(argv), env, user, stdin=True)
        with translate_faults(self.id):
            return exec_id, await self._engine.hijack(f"exec/{exec_id}/start", body={"Detach": False, "Tty": False})

    def _place(self, cwd: str | None) -> str:
        path = posixpath.join(self._who.workdir, cwd or "")
        if "\0" in path:
            raise PathError(path, "EINVAL", hint="a path has no NUL")
        return path if path == "/" else path.rstrip("/") or "/"

    async def _create(self, argv: list[str], env: Mapping[str, str], user: str, *, stdin: bool) -> str:
        body = {
            "AttachStdin": stdin,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": argv,
            "Env": [f"{name}={value}" for name, value in env.items()],
            "User": user,
            "WorkingDir": "/",
        }
        with translate_faults(self.id):
            made = await self._engine.call("POST", f"containers/{self._container}/exec", body=body)
        return made["Id"]

    async def _run(self, exec_id: str, output: Output, stdin: bytes | None) -> int:
        """Start it, feed it, read it to its end; its exit code."""
        try:
            stream = await self._engine.hijack(f"exec/{exec_id}/start", body={"Detach": False, "Tty": False})
        except EngineRefused as refused:
            raise self._not_started(refused) from None
        feeding = asyncio.create_task(_feed(stream, stdin)) if stdin is not None else None
        try:
            code = await self._read(exec_id, stream, output)
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            stream.close()
        if code in (125, 126, 127) and (said := _never_ran(output.stdout or output.stderr)):
            raise self._not_started(EngineRefused(500, said))
        return code

    def _not_started(self, refused: EngineRefused) -> SandboxError:
        if is_gone(refused):
            return SandboxGone(f"sandbox {self.id} is gone", hint="open another sandbox")
        return SandboxError(
            f"the program could not be started: {refused.text[:200]}", hint="is there such a user in it?"
        )

    async def _read(self, exec_id: str, stream: Stream, output: Output) -> int:
        """Until the stream ends, or the program has and nothing more comes. The engine repeats no output: a stream that
        breaks is an error."""
        pause = _LOOK_S
        reading = asyncio.ensure_future(stream.receive())
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=pause)
                if done:
                    if (got := reading.result()) is None:
                        if stream.broken:
                            raise SandboxInterrupted(f"the connection of a program in sandbox {self.id} broke")
                        return await self._code(exec_id)
                    output.take(*got)
                    reading = asyncio.ensure_future(stream.receive())
                    continue
                state = await self._look(exec_id)
                if not state.get("Running"):
                    while (await asyncio.wait([reading], timeout=_LOOK_S))[0] and (got := reading.result()):
                        output.take(*got)
                        reading = asyncio.ensure_future(stream.receive())
                    return await self._code(exec_id)
                pause = min(pause * 2, 2.0)
        finally:
            reading.cancel()

    async def _look(self, exec_id: str) -> Mapping[str, Any]:
        try:
            return await self._engine.call("GET", f"exec/{exec_id}/json")
        except EngineRefused:
            raise SandboxGone(f"sandbox {self.id} is gone", hint="open another sandbox") from None

    async def _code(self, exec_id: str) -> int:
        """The exit code, which the engine may know a moment after the output has ended. An engine ends the output with the
        program, never before: when it goes on, something between has cut the connection. Docker then ends the program with
        a 126 of its own."""
        pause, ended, running = 0.005, time.monotonic(), False
        while (state := await self._look(exec_id)).get("Running") or state.get("ExitCode") is None:
            running = bool(state.get("Running"))
            if time.monotonic() - ended > _LATE_S:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
        if running and (state.get("Running") or state.get("ExitCode") == _CUT_OFF):
            raise SandboxInterrupted(f"the connection of a program in sandbox {self.id} was cut")
        if state["ExitCode"] in (137, -1) and not await self.alive():
            raise SandboxGone(f"sandbox {self.id} is gone", hint="open another sandbox")
        return int(state["ExitCode"])

    async def alive(self) -> bool:
        try:
            found = await self._engine.call("GET", f"containers/{self._container}/json", timeout=15.0)
        except SandboxError:
            return False
        return bool(found["State"].get("Running")) and found["State"].get("Status") != "removing"

    async def _end(self, mark: str, user: str) -> None:
        """By the program's own user, who alone may read its environment, and by root."""
        for who in dict.fromkeys((user, ROOT)):
            try:
                await job_shim.kill_tree(self.exec_plain, mark, user=who)
            except SandboxGone:
                return

    async def _oom(self) -> bool:
        """Whether the memory limit has killed something since the last look."""
        kills = 0
        for line in (await self.script(_OOM)).stdout.splitlines():
            name, _, count = line.partition(b" ")
            if name == b"oom_kill" and count.isdigit():
                kills = max(kills, int(count))
        more, self._oom_seen = kills > self._oom_seen, max(kills, self._oom_seen)
        return more


async def _feed(stream: Stream, data: bytes) -> None:
    try:
        for at in range(0, len(data), 2**16):
            await stream.send(data[at : at + 2**16])
        await stream.send_eof()
    except ConnectionError:
        return  # it has ended without reading all of it


def _never_ran(said: bytes) -> str:
    """The words with which an engine says, in the program's own output, that it could not start it; "" for any others."""
    signs = (b"OCI runtime exec failed", b"unable to find user", b"unable to find group")
    podman = said.startswith(b"Error: ") and b"OCI runtime" in said
    return said.decode("utf-8", "replace").strip() if said.startswith(signs) or podman else ""
