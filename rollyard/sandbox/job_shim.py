"""Durable jobs for backends that have none of their own: a directory in the sandbox and small shell scripts.

The scripts are in `inside/job_scripts.py`; here is the host's side. Streams are offsets into files of the job's directory, so a
dropped connection loses no byte. A job's stdin is null.
"""

from __future__ import annotations

import base64
import binascii
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import anyio
import msgspec

from rollyard.core.errors import SandboxError, UnknownName, Unsupported
from rollyard.core.ids import new_id
from rollyard.core.program import Program
from rollyard.core.sandbox import Exit
from rollyard.inside import job_scripts as scripts
from rollyard.sandbox.retry import LOOKS, retry_open

ROOT = "/tmp/.rollyard/jobs"
MARK = scripts.MARK
STEP_S = 30.0  # for one look at a job
CHUNK = 1 << 20
_START_GRACE_S = 10.0
_KILLED_LOOKS = 3
_POLLS = 200  # of 50 ms each, at least, before a long poll answers that nothing has happened
_MAX_OUTPUT = 16 * 2**20


class Runs(Protocol):
    """The one thing a backend must be able to do: run a short command with its own environment."""

    async def __call__(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float,
    ) -> Exit: ...


class JobState(msgspec.Struct, frozen=True):
    state: str  # starting, running, exit, lost
    code: int | None = None


class ShimJob:
    def __init__(
        self, run: Runs, job_id: str, *, root: str = ROOT, exact: bool = True, started: float | None = None
    ) -> None:
        self.id = job_id
        self._run, self._exact = run, exact
        self._dir = f"{root}/{job_id}"
        self._began = time.monotonic() if started is None else started
        self._killed = False

    async def _script(self, script: str, *args: str, timeout: float = STEP_S) -> Exit:
        """Again when its connection broke, and again when it was killed: a program that ends every other one in the sandbox ends
        the one that looks, too."""
        argv = ["/bin/sh", "-c", script, "rollyard", *args]
        done = await repeat(self._run, argv, timeout=timeout)
        for _ in range(_KILLED_LOOKS):
            if done.exit_code not in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
                break
            done = await repeat(self._run, argv, timeout=timeout)
        return done

    async def look(self, script: str = scripts.LOOK, *args: str) -> JobState:
        done = await self._script(script, self._dir, *args)
        words = done.stdout.split()
        if not done.ok or not words:
            raise SandboxError(f"job {self.id} cannot be looked at: {done.text[-300:].strip()}")
        state = words[0].decode()
        if state == "unknown":
            raise UnknownName("job", self.id, [])
        if state == "starting" and time.monotonic() - self._began > _START_GRACE_S:
            return JobState("lost")
        return JobState(state, int(words[1]) if state == "exit" else None)

    async def poll(self) -> int | None:
        return (await self.look()).code

    async def wait(self, timeout: float | None = None) -> Exit:
        """Raises TimeoutError without touching the job. A wrapper that vanished gives an exit that says `lost`."""
        with anyio.fail_after(timeout):
            found = await self._until_over()
        out = await self._read_whole("out")
        err = await self._read_whole("err")
        return Exit(
            exit_code=found.code,
            stdout=out[:_MAX_OUTPUT],
            stderr=err[:_MAX_OUTPUT],
            signal=found.code - 128 if found.code is not None and 128 < found.code < 160 else None,
            lost=found.state == "lost" and not self._killed,
            truncated=len(out) > _MAX_OUTPUT or len(err) > _MAX_OUTPUT,
            duration_s=time.monotonic() - self._began,
        )

    async def _until_over(self) -> JobState:
        while (found := await self.look(scripts.AWAIT, str(_POLLS))).state in {"starting", "running"}:
            continue
        return found

    async def stream(self, offset: int = 0, *, stderr: bool = False) -> AsyncIterator[tuple[int, bytes]]:
        """(next offset, bytes) from `offset` on, live, until the job is over and everything was read."""
        name = "err" if stderr else "out"
        while True:
            data = await self._read(name, offset, CHUNK, polls=_POLLS)
            if not data:
                if (await self.look()).state not in {"exit", "lost"}:
                    continue
                data = await self._read(name, offset, CHUNK)  # written between the last read and the end
                if not data:
                    return
            offset += len(data)
            yield offset, data

    async def tail(self, n: int = 4096, *, stderr: bool = False) -> bytes:
        name = "err" if stderr else "out"
        return self._decode(await self._script(self._encode('tail -c $2 "$1"'), f"{self._dir}/{name}", str(n)))

    async def _read_whole(self, name: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size <= _MAX_OUTPUT and (data := await self._read(name, size, CHUNK)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    async def _read(self, name: str, offset: int, size: int, polls: int = 0) -> bytes:
        """What lies from `offset` on; with `polls`, after waiting for something to lie there."""
        numbers = (str(offset), str(size), str(polls))
        return self._decode(await self._script(self._encode(scripts.FOLLOW), self._dir, name, *numbers))

    def _encode(self, script: str) -> str:
        return script if self._exact else f"{script} | base64"

    def _decode(self, done: Exit) -> bytes:
        if not done.ok:
            raise SandboxError(
                f"output of job {self.id} cannot be read: {done.stderr[-300:].decode('utf-8', 'replace')}"
            )
        if self._exact:
            return done.stdout
        try:
            return base64.b64decode(done.stdout)
        except binascii.Error as error:
            raise SandboxError(f"output of job {self.id} came back garbled") from error

    async def write(self, data: bytes) -> None:
        raise Unsupported(f"job {self.id} runs with its stdin closed", hint="give input in a file")

    async def close_stdin(self) -> None:
        """It was never open."""

    async def cpu_s(self) -> float | None:
        done = await self._script(scripts.CPU, self._dir)
        total = 0
        for line in done.stdout.splitlines():
            fields = line.rpartition(b")")[2].split()
            if len(fields) > 12:
                total += int(fields[11]) + int(fields[12])
        return total / 100 if done.ok else None

    async def kill(self) -> None:
        """The whole tree, also what left its group and session; a job that is over is left alone."""
        self._killed = True
        await self._script(scripts.KILL, self._dir)


async def repeat(run: Runs, argv: Sequence[str], *, timeout: float, **options: Any) -> Exit:
    """A script of this file, over connections that may break: each does no harm when it is run again."""
    return await retry_open(lambda: run(argv, timeout=timeout, **options), LOOKS, idempotent=True)


async def launch(run: Runs, program: Program, *, root: str = ROOT, exact: bool = True) -> ShimJob:
    """Start a program under the shim. The same `job_id` again finds the job that is there."""
    name = program.job_id or new_id("job")
    job = ShimJob(run, name, root=root, exact=exact)
    done = await repeat(
        run,
        ["/bin/sh", "-c", scripts.LAUNCH, "rollyard", f"{root}/{name}", scripts.WRAP, *program.argv],
        env={**program.env, MARK: name},
        cwd=program.cwd,
        user=program.user,
        timeout=STEP_S,
    )
    if not done.ok:
        raise SandboxError(f"job could not be started: {done.text[-300:].strip() or f'exit code {done.exit_code}'}")
    return job


def attach_argv(argv: Sequence[str], job_id: str, *, root: str = ROOT) -> list[str]:
    """The argv of a program that is the job and keeps its own stdin; start it with `MARK` in its environment."""
    return ["/bin/sh", "-c", scripts.ATTACH, "rollyard", f"{root}/{job_id}", scripts.WRAP, *argv]


async def finish(
    run: Runs,
    argv: Sequence[str],
    job_id: str,
    *,
    env: Mapping[str, str],
    cwd: str,
    most: int,
    root: str = ROOT,
    one_call_s: float | None = None,
) -> Exit:
    """Run a program under the shim to its end: one call for a short one, then one every ten seconds. Where a call may last
    (`one_call_s`), one call stands until the end and looks at no clock; `root` is there already. A call whose answer was lost
    is asked again and starts nothing twice. Its files stay; who asks removes them."""
    began, place = time.monotonic(), f"{root}/{job_id}"
    if one_call_s is None:
        first = [scripts.FINISH, "rollyard", str(most), str(_POLLS), place, scripts.WRAP, *argv]
    else:
        first = [scripts.FINISH_HERE, "rollyard", str(most), place, *argv]
    done = await _ask(run, ["/bin/sh", "-c", *first], env={**env, MARK: job_id}, cwd=cwd, timeout=one_call_s or STEP_S)
    while (end := _parse_end(done, most, began)) is None:
        done = await _ask(run, ["/bin/sh", "-c", scripts.END, "rollyard", place, str(most), str(_POLLS), "0"], cwd="/")
    return end


async def so_far(run: Runs, job_id: str, *, most: int, root: str = ROOT) -> tuple[bytes, bytes]:
    """What a program has said until now."""
    argv = ["/bin/sh", "-c", scripts.END, "rollyard", f"{root}/{job_id}", str(most), "0", "1"]
    head, _, body = (await _ask(run, argv, cwd="/")).stdout.partition(b"\n")
    size = min(int(head.split()[-2]), most) if head.split() else 0
    return body[:size], body[size:]


async def _ask(
    run: Runs, argv: Sequence[str], *, cwd: str, env: Mapping[str, str] | None = None, timeout: float = STEP_S
) -> Exit:
    """A program that ends every other one in the sandbox ends the one that looks, too."""
    done = await repeat(run, argv, env=env, cwd=cwd, timeout=timeout)
    for _ in range(_KILLED_LOOKS):
        if done.exit_code not in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            break
        done = await repeat(run, argv, env=env, cwd=cwd, timeout=timeout)
    if not done.ok:
        raise SandboxError(
            f"a program could not be started: {done.text[-300:].strip() or f'exit code {done.exit_code}'}"
        )
    return done


def _parse_end(done: Exit, most: int, began: float) -> Exit | None:
    """None while it runs, and where it was launched before: then nothing is said."""
    head, _, body = done.stdout.partition(b"\n")
    words = head.decode().split()
    if not words or words[0] not in ("exit", "lost"):
        return None
    out_size, err_size = int(words[-2]), int(words[-1])
    out, err = min(out_size, most), min(err_size, most)
    code = int(words[1]) if words[0] == "exit" else None
    return Exit(
        exit_code=code,
        stdout=body[:out],
        stderr=body[out : out + err],
        signal=code - 128 if code is not None and 128 < code < 160 else None,
        lost=code is None,
        truncated=out_size > most or err_size > most,
        duration_s=time.monotonic() - began,
    )


async def kill_tree(run: Runs, mark: str, *, user: str | None = None) -> None:
    """End every process that has `MARK=mark` in its environment, whatever started it."""
    await repeat(run, ["/bin/sh", "-c", scripts.KILL, "rollyard", mark], user=user, timeout=STEP_S)


async def kill_all(run: Runs) -> None:
    """End every process that was started with a mark, and what they started."""
    await repeat(run, ["/bin/sh", "-c", scripts.KILL_ALL, "rollyard"], timeout=STEP_S)


async def find(run: Runs, job_id: str, *, root: str = ROOT, exact: bool = True) -> ShimJob:
    """A job started earlier, perhaps by another process."""
    if "/" in job_id or not job_id:
        raise UnknownName("job", job_id, [])
    job = ShimJob(run, job_id, root=root, exact=exact, started=0.0)
    await job.look()
    return job
