"""Durable jobs for backends that have none of their own: a directory in the sandbox and small shell scripts.

A job's directory holds `out`, `err`, `pid` (with the process's start time, since pids come back) and, once it ended, `exit`,
which appears by rename and so is never half written. `mkdir` of the directory is the launch guard: a launch that is repeated
because its answer was lost starts nothing twice. Streams are offsets into the files, so a dropped connection loses no byte.

A program may leave its process group and session, so killing goes by a variable that every descendant inherits. Needs /bin/sh,
cat, tail, head, grep, sleep and /proc in the sandbox; `setsid` where present. Its stdin is null.
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
from rollyard.core.sandbox import Exit
from rollyard.sandbox.retry import LOOKS, retrying

ROOT = "/tmp/.rollyard/jobs"
MARK = "ROLLYARD_JOB"
STEP_S = 30.0  # for one look at a job
CHUNK = 1 << 20
_START_GRACE_S = 10.0
_KILLED_LOOKS = 3
_POLLS = 200  # of 50 ms each, at least, before a long poll answers that nothing has happened
_MAX_OUTPUT = 16 * 2**20

_STARTED = "started() { read -r s 2>/dev/null </proc/$1/stat || return 1; s=${s##*) }; set -- $s; echo ${20}; }\n"
_RUN = (
    'echo "$$ $(started $$)" >"$d/pid.new"; mv "$d/pid.new" "$d/pid"; '
    '"$@" >"$d/out" 2>"$d/err"; c=$?; echo $c >"$d/exit.new"; mv "$d/exit.new" "$d/exit"\n'
)
_WRAP = _STARTED + "d=$1; shift; " + _RUN
_CLAIM = 'mkdir "$d" 2>/dev/null || { [ -d "$d" ] && exit 0; exit 73; }\n: >"$d/out"; : >"$d/err"\n'
_MAKE = 'd=$1; wrap=$2; shift 2\nmkdir -p "${d%/*}" && chmod 1777 "${d%/*}" 2>/dev/null\n' + _CLAIM
_LAUNCH = (
    _MAKE
    + """if command -v setsid >/dev/null 2>&1; then setsid sh -c "$wrap" job "$d" "$@" </dev/null >/dev/null 2>&1 &
else sh -c "$wrap" job "$d" "$@" </dev/null >/dev/null 2>&1 & fi
n=0; while [ ! -f "$d/pid" ] && [ $n -lt 200 ]; do n=$((n+1)); sleep 0.02; done
"""
)
_ATTACHED = _MAKE + 'exec sh -c "$wrap" job "$d" "$@"'
_STATE = (
    _STARTED
    + """state() {
  [ -d "$1" ] || { echo unknown; return; }
  [ -f "$1/exit" ] && { read -r code <"$1/exit"; echo "exit $code"; return; }
  [ -f "$1/pid" ] || { echo starting; return; }
  read -r pid was <"$1/pid"
  [ "$(started "$pid")" = "$was" ] && { echo running; return; }
  [ -f "$1/exit" ] && { read -r code <"$1/exit"; echo "exit $code"; return; }
  echo lost
}
over() { [ -f "$1/exit" ] || { n=$((n+1)); [ $((n % 20)) -eq 0 ] && case $(state "$1") in lost|unknown) ;; *) false ;; esac; }; }
"""
)
_LOOK = _STATE + 'state "$1"\n'
# The two long polls: they stand still inside the sandbox until there is something to say, but not for ever.
_AWAIT = _STATE + 'n=0; while [ $n -lt $2 ] && ! over "$1"; do sleep 0.05; done; state "$1"\n'
_FOLLOW = (
    _STATE
    + 'n=0; while [ $n -lt $5 ] && [ "$(wc -c <"$1/$2")" -le $3 ] && ! over "$1"; do sleep 0.05; done; '
    + 'tail -c +$(($3+1)) "$1/$2" | head -c $4'
)
# For a caller that wants the end and the output at once: as few calls as possible, each of them short and safe to repeat.
_TELL = (
    _STATE
    + """tell() { s=$(state "$1"); o=$(($(wc -c <"$1/out"))); e=$(($(wc -c <"$1/err")))
  case $s in exit*|lost) ;; *) [ "$3" = 1 ] || o=0 e=0 ;; esac
  echo "$s $o $e"; [ $o -gt $2 ] && o=$2; [ $e -gt $2 ] && e=$2
  [ $o = 0 ] || head -c $o "$1/out"; [ $e = 0 ] || head -c $e "$1/err"
}
patient() { n=0; while [ $n -lt $2 ] && ! over "$1"; do if [ $n -lt 20 ]; then sleep 0.01; else sleep 0.05; fi; done; }
"""
)
_FINISH = "most=$1; polls=$2; shift 2\n" + _LAUNCH + _TELL + 'patient "$d" "$polls"; tell "$d" "$most" 0\n'
_FINISH_HERE = "most=$1; d=$2; shift 2; exec </dev/null\n" + _TELL + _CLAIM + _RUN + 'tell "$d" "$most" 0\n'
_END = _TELL + '[ -d "$1" ] || exit 74; patient "$1" "$3"; tell "$1" "$2" "$4"\n'

_FIND = (
    f'mine() {{ grep -l "{MARK}=$1" /proc/[0-9]*/environ 2>/dev/null'
    " | while IFS=/ read -r _ _ p _; do echo $p; done; }\n"
)
_KILL = (
    _FIND
    + """d=$1; id=${d##*/}; n=0
while [ $n -lt 100 ]; do
  pids=$(mine "$id"); [ -z "$pids" ] && break
  kill -9 $pids 2>/dev/null; n=$((n+1)); sleep 0.02
done
"""
)
_KILL_ALL = f"""n=0; while [ $n -lt 100 ]; do
pids=$(grep -l "{MARK}=" /proc/[0-9]*/environ 2>/dev/null | while IFS=/ read -r _ _ p _; do echo $p; done)
[ -z "$pids" ] && exit 0; kill -9 $pids 2>/dev/null; n=$((n+1)); sleep 0.02; done"""
_CPU = _FIND + 'for p in $(mine "${1##*/}"); do cat /proc/$p/stat 2>/dev/null; done\n'


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
        """Again when its connection broke, and again when it was killed: whoever ends every program in the sandbox ends
        the one that looks, too."""
        argv = ["/bin/sh", "-c", script, "rollyard", *args]
        done = await repeated(self._run, argv, timeout=timeout)
        for _ in range(_KILLED_LOOKS):
            if done.exit_code not in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
                break
            done = await repeated(self._run, argv, timeout=timeout)
        return done

    async def look(self, script: str = _LOOK, *args: str) -> JobState:
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
        out = await self._whole("out")
        err = await self._whole("err")
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
        while (found := await self.look(_AWAIT, str(_POLLS))).state in {"starting", "running"}:
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
        return self._decoded(await self._script(self._coded('tail -c $2 "$1"'), f"{self._dir}/{name}", str(n)))

    async def _whole(self, name: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size <= _MAX_OUTPUT and (data := await self._read(name, size, CHUNK)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    async def _read(self, name: str, offset: int, size: int, polls: int = 0) -> bytes:
        """What lies from `offset` on; with `polls`, after waiting for something to lie there."""
        numbers = (str(offset), str(size), str(polls))
        return self._decoded(await self._script(self._coded(_FOLLOW), self._dir, name, *numbers))

    def _coded(self, script: str) -> str:
        return script if self._exact else f"{script} | base64"

    def _decoded(self, done: Exit) -> bytes:
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
        done = await self._script(_CPU, self._dir)
        total = 0
        for line in done.stdout.splitlines():
            fields = line.rpartition(b")")[2].split()
            if len(fields) > 12:
                total += int(fields[11]) + int(fields[12])
        return total / 100 if done.ok else None

    async def kill(self) -> None:
        """The whole tree, also what left its group and session; a job that is over is left alone."""
        self._killed = True
        await self._script(_KILL, self._dir)


async def repeated(run: Runs, argv: Sequence[str], *, timeout: float, **options: Any) -> Exit:
    """A script of this file, over connections that may break: each does no harm when it is run again."""
    return await retrying(lambda: run(argv, timeout=timeout, **options), LOOKS, idempotent=True)


async def launch(
    run: Runs,
    argv: Sequence[str],
    *,
    job_id: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    root: str = ROOT,
    exact: bool = True,
) -> ShimJob:
    """Start a command under the shim. The same `job_id` again finds the job that is there."""
    name = job_id or new_id("job")
    job = ShimJob(run, name, root=root, exact=exact)
    done = await repeated(
        run,
        ["/bin/sh", "-c", _LAUNCH, "rollyard", f"{root}/{name}", _WRAP, *argv],
        env={**(env or {}), MARK: name},
        cwd=cwd,
        user=user,
        timeout=STEP_S,
    )
    if not done.ok:
        raise SandboxError(f"job could not be started: {done.text[-300:].strip() or f'exit code {done.exit_code}'}")
    return job


def attached(argv: Sequence[str], job_id: str, *, root: str = ROOT) -> list[str]:
    """The argv of a program that is the job and keeps its own stdin; start it with `MARK` in its environment."""
    return ["/bin/sh", "-c", _ATTACHED, "rollyard", f"{root}/{job_id}", _WRAP, *argv]


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
        first = [_FINISH, "rollyard", str(most), str(_POLLS), place, _WRAP, *argv]
    else:
        first = [_FINISH_HERE, "rollyard", str(most), place, *argv]
    done = await _asked(
        run, ["/bin/sh", "-c", *first], env={**env, MARK: job_id}, cwd=cwd, timeout=one_call_s or STEP_S
    )
    while (told := _told(done, most, began)) is None:
        done = await _asked(run, ["/bin/sh", "-c", _END, "rollyard", place, str(most), str(_POLLS), "0"], cwd="/")
    return told


async def so_far(run: Runs, job_id: str, *, most: int, root: str = ROOT) -> tuple[bytes, bytes]:
    """What a program has said until now."""
    argv = ["/bin/sh", "-c", _END, "rollyard", f"{root}/{job_id}", str(most), "0", "1"]
    head, _, body = (await _asked(run, argv, cwd="/")).stdout.partition(b"\n")
    size = min(int(head.split()[-2]), most) if head.split() else 0
    return body[:size], body[size:]


async def _asked(
    run: Runs, argv: Sequence[str], *, cwd: str, env: Mapping[str, str] | None = None, timeout: float = STEP_S
) -> Exit:
    """Whoever ends every program in the sandbox ends the one that looks, too."""
    done = await repeated(run, argv, env=env, cwd=cwd, timeout=timeout)
    for _ in range(_KILLED_LOOKS):
        if done.exit_code not in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            break
        done = await repeated(run, argv, env=env, cwd=cwd, timeout=timeout)
    if not done.ok:
        raise SandboxError(
            f"a program could not be started: {done.text[-300:].strip() or f'exit code {done.exit_code}'}"
        )
    return done


def _told(done: Exit, most: int, began: float) -> Exit | None:
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
    await repeated(run, ["/bin/sh", "-c", _KILL, "rollyard", mark], user=user, timeout=STEP_S)


async def kill_all(run: Runs) -> None:
    """End every process that was started with a mark, and what they started."""
    await repeated(run, ["/bin/sh", "-c", _KILL_ALL, "rollyard"], timeout=STEP_S)


async def find(run: Runs, job_id: str, *, root: str = ROOT, exact: bool = True) -> ShimJob:
    """A job started earlier, perhaps by another process."""
    if "/" in job_id or not job_id:
        raise UnknownName("job", job_id, [])
    job = ShimJob(run, job_id, root=root, exact=exact, started=0.0)
    await job.look()
    return job
