"""Verifier code: Python that a task's author wrote into it, run in a sandbox of its own and never in this process.

The sandbox has no network. The code's questions about databases come out over the program's pipes, one at a time, and are
answered from the instance, read-only. What is not a score is None: an exception, a syntax error, a timeout, a text, a NaN.
Code is known by its sha256, so the same code is the same verifier everywhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import EnvError, EnvUnavailable, EpisodeLost, PathError
from rollyard.core.protocols import Backend, Job, Sandbox
from rollyard.core.sandbox import SandboxSpec
from rollyard.envs.fleet.databases import Databases, program_path
from rollyard.inside.verifier import archive

TIMEOUT_S = 60.0
JUDGE_ERROR = "JUDGE ERROR:"
NO_SCORE = "NoScore"  # what the sandbox's program says of code that ran and gave something else
_PREVIEW_LINES = 6
_MARGIN_S = 60.0
_MAX_LINE = 64 * 2**20


class VerifierCode(msgspec.Struct, frozen=True, kw_only=True):
    """`function` is the verifier among the code's functions; without it the one marked `@verifier`, or the first that takes an
    environment. `pickled` are arguments as a remote client sent them: they are opened in the sandbox only."""

    code: str
    task_key: str = ""
    function: str | None = None
    final_answer: str | None = None
    conversation: Any = None
    pickled: str | None = None
    env_key: str | None = None
    instance_id: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.code.encode()).hexdigest()


class DetailedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check as `verify_detailed` of Fleet's SDK tells it: `success` is that the code ran to its end, whatever it returned, and
    `error` has `type`, `message` and `traceback` where it did not."""

    success: bool
    result: Any = None
    score: float | None = None
    error: Mapping[str, Any] | None = None
    stdout: str = ""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is None unless the code ran and gave one; `error` then says why, in words for people."""

    score: float | None
    sha256: str
    seconds: float
    result: Any = None
    stdout: str = ""
    error: str | None = None
    cause: Mapping[str, Any] = {}  # type, message, line, text, traceback
    functions: tuple[str, ...] = ()

    @property
    def detailed(self) -> DetailedCheck:
        success = self.score is not None or self.cause.get("type") == NO_SCORE
        error = None if success else self.cause or {"type": "Error", "message": self.error or ""}
        return DetailedCheck(success=success, result=self.result, score=self.score, error=error, stdout=self.stdout)


class _Cause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = "Error"
    message: str = ""
    line: int | None = None
    text: str | None = None
    traceback: str = ""


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the program in the sandbox says that the code ended. The code may have said it in its place."""

    score: float | None = None
    result: Any = None
    error: _Cause | None = None
    stdout: str = ""
    functions: tuple[str, ...] = ()


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """The end, or a question about a database."""

    ended: _Ended | None = None
    database: str = ""
    query: str = ""
    args: list[Any] = []


async def run_check(
    backend: Backend, check: VerifierCode, databases: Databases | None = None, *, timeout_s: float = TIMEOUT_S
) -> Checked:
    """Opens a sandbox for this one check. A sandbox that cannot be had is an error, as is an instance whose databases cannot be
    asked; everything else is a result."""
    spec = SandboxSpec(ttl_s=timeout_s + _MARGIN_S, labels={"rollyard.check": check.sha256[:16]})
    async with backend.open(spec) as sandbox:
        return await check_in(sandbox, check, databases, timeout_s=timeout_s)


async def check_in(
    sandbox: Sandbox, check: VerifierCode, databases: Databases | None = None, *, timeout_s: float = TIMEOUT_S
) -> Checked:
    """The same in a sandbox that was opened for it."""
    started = time.monotonic()
    names = await databases.names() if databases is not None else ()
    job = await _start(sandbox, check, names)
    try:
        async with asyncio.timeout(timeout_s):
            ended = await _converse(job, databases)
    except TimeoutError:
        ended = _error("Timeout", f"the verifier took longer than {timeout_s:g} s")
    finally:
        await job.kill()
    return _conclude(check, ended, time.monotonic() - started)


async def _start(sandbox: Sandbox, check: VerifierCode, names: Any) -> Job:
    path = program_path()
    await sandbox.write(path, archive(), mode=0o444)
    job = await sandbox.start(["python3", "-I", path, "check"], stdin=True)
    request = {
        "code": check.code,
        "function": check.function,
        "final_answer": check.final_answer,
        "conversation": check.conversation,
        "pickled": check.pickled,
        "env": {"env_key": check.env_key, "instance_id": check.instance_id, "databases": list(names)},
    }
    await job.write(msgspec.json.encode(request) + b"\n")
    return job


async def _converse(job: Job, databases: Databases | None) -> _Ended:
    """Answer its questions until it says how it ended."""
    held = b""
    async for _, chunk in job.stream():
        held += chunk
        if len(held) > _MAX_LINE:
            return _error("TooMuch", "the verifier's program wrote more than can be read")
        *lines, held = held.split(b"\n")
        for line in lines:
            try:
                said = msgspec.json.decode(line, type=_Said)
            except BAD_JSON:
                return _error("Garbled", "the verifier's program wrote something that is not its own")
            if said.ended is not None:
                return said.ended
            try:
                await job.write(msgspec.json.encode(await _answer(said, databases)) + b"\n")
            except PathError:
                return _error("Died", "the verifier's program ended without a result, while it asked")
    errors = (await job.tail(stderr=True)).decode("utf-8", "backslashreplace")
    return _error("Died", f"the verifier's program ended without a result: {errors.strip()[-500:] or 'no output'}")


async def _answer(said: _Said, databases: Databases | None) -> dict[str, Any]:
    if databases is None:
        return {"ok": False, "error": "there is no instance whose databases could be read"}
    try:
        rows = await databases.query(said.database, said.query, said.args)
        if rows.truncated:
            return {"ok": False, "error": f"more than {len(rows.rows)} rows: narrow the query"}
        return {"ok": True, "columns": rows.columns, "rows": rows.rows}
    except (EnvUnavailable, EpisodeLost):
        raise  # nothing that the code makes of it is a score
    except EnvError as error:
        return {"ok": False, "error": error.message}


def _error(kind: str, message: str) -> _Ended:
    return _Ended(error=_Cause(type=kind, message=message))


def _conclude(check: VerifierCode, ended: _Ended, seconds: float) -> Checked:
    score, said = ended.score, ended.error
    if score is not None and JUDGE_ERROR in ended.stdout:
        score, said = None, _Cause(type="JudgeError", message="a model judge failed while the verifier ran")
    cause = {} if said is None else {"type": said.type, "message": said.message, **msgspec.to_builtins(said)}
    return Checked(
        score=score,
        sha256=check.sha256,
        seconds=seconds,
        result=ended.result,
        stdout=ended.stdout,
        error=None if score is not None else explain(check, cause, ended.functions),
        cause=cause,
        functions=ended.functions,
    )


def explain(check: VerifierCode, cause: Mapping[str, Any], functions: tuple[str, ...]) -> str:
    """A failure in words: which task, what went wrong and where, which functions there are, how the code begins."""
    line = f" at line {cause['line']}: {cause.get('text') or ''}" if cause.get("line") else ""
    preview = "\n".join(f"  {text}" for text in check.code.strip().splitlines()[:_PREVIEW_LINES])
    return (
        f"verifier of task {check.task_key or '(unnamed)'} gave no score: "
        f"{cause.get('type', 'Error')}: {cause.get('message', '')}{line}\n"
        f"functions found: {', '.join(functions) or 'none'}\ncode begins:\n{preview}"
    )
