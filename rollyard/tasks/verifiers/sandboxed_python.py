"""The Python verifier of a task from elsewhere: its code runs in a sandbox of its own, never in the runner's process.

That sandbox is a fresh one from the task's image (or the verifier's own), without a network and without a variable of the host.
The agent's files are not in it: programs that the check runs in the judge's sandbox cannot reach the check. What the check asks
of `sandbox` comes here as a line of JSON and is done by the very calls that a check in this process would make. What it gives is
data of a bounded size, read by the same rules. The other side is `inside/python_check.py`.
"""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, EnvError, Error, PathError, SandboxError, Unsupported, VerifierError
from rollyard.core.program import MAX_OUTPUT
from rollyard.core.protocols import Backend, Job, Sandbox
from rollyard.core.rollout import Rollout, Verdict
from rollyard.core.sandbox import DEFAULT_PATH, SandboxSpec
from rollyard.core.task import VerifierSpec
from rollyard.tasks.verifiers.python import PythonVerifier, as_verdict, read_reference

FOLDER = "/rollyard-verifier"
MESSAGE_BYTES = 32 * 2**20  # of one line from the check
READ_BYTES = 64 * 2**20
_AT_ONCE = 16  # calls that the check may have under way
_MOST_JOBS = 8  # the host keeps what each prints
_SHOWN = 2000
_NO_PYTHON = 127
_LARGE = ("log", "files", "events", "workdir", "turns")  # of a rollout: fetched when the check reads them
_SMALL = (*(set(Rollout.__struct_fields__) - {*_LARGE, "trajectory"}), "reward", "trainable", "task_id", "error")
_CALLS = frozenset(
    ("exec", "start", "job", "read", "read_text", "write", "exists", "stat", "list_dir", "mkdir", "remove", "alive")
)
_JOB_CALLS = frozenset(("poll", "wait", "tail", "write", "close_stdin", "cpu_s", "kill"))
_MOST = {"max_output": MAX_OUTPUT, "max_bytes": READ_BYTES, "n": READ_BYTES}


class _Link:
    """One check while it runs: its messages, and the calls it has under way."""

    def __init__(self, job: Job, sandbox: Sandbox, rollout: Rollout) -> None:
        self._job, self._sandbox, self._rollout = job, sandbox, rollout
        self._sending, self._places = anyio.Lock(), anyio.Semaphore(_AT_ONCE)
        self._jobs = 0
        self._raised: dict[int, SandboxError | EnvError] = {}

    async def talk(self) -> Verdict:
        """Answers calls until the check has ended."""
        sandbox = {
            name: getattr(self._sandbox, name, None) for name in ("id", "cwd", "user", "env", "info", "capabilities")
        }
        rollout = _encode_fields("Rollout", {name: getattr(self._rollout, name) for name in _SMALL})
        await self._send({"sandbox": _encode(sandbox), "rollout": rollout})
        ended: dict[str, Any] | Error = VerifierError("the verifier's code was not heard")
        async with anyio.create_task_group() as group:
            try:
                ended = await self._serve(group)
            except Error as error:  # not out of the group, which would wrap it
                ended = error
            group.cancel_scope.cancel()
        if isinstance(ended, Error):
            raise ended
        return self._end(ended)

    async def _serve(self, group: TaskGroup) -> dict[str, Any]:
        async for line in _lines(self._job):
            message = _read_message(line)
            if "id" not in message:
                return message
            await self._places.acquire()
            group.start_soon(self._answer, message)
        said = (await self._job.tail(_SHOWN, stderr=True)).decode("utf-8", "backslashreplace").strip()
        code = await self._job.poll()
        if code == _NO_PYTHON:
            raise VerifierError(
                f"the verifier is Python code, and its sandbox has no python3: {said}",
                hint="use an image with python3, or give the verifier a layer: layers = ['pip:NAME==VERSION']",
            )
        raise VerifierError(f"the verifier's code ended with exit code {code} and no verdict: {said}")

    def _end(self, message: Mapping[str, Any]) -> Verdict:
        if "failed" not in message:
            return _as_verdict(_decode(message.get("gives")))
        if (error := self._raised.get(message.get("call") or 0)) is not None:
            raise error  # the sandbox broke, not the check
        return Verdict(status="failed", error=str(message["failed"]), log=str(message.get("log", "")))

    async def _send(self, message: Any) -> None:
        async with self._sending:
            await self._job.write(msgspec.json.encode(message) + b"\n")

    async def _answer(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        try:
            value = await self._call(
                str(message.get("call")), _decode(message.get("args")), _decode(message.get("options"))
            )
            answer = {"id": number, "value": _encode(value)}
        except Exception as error:  # noqa: BLE001 - whatever the author's arguments cause is the answer to the author's code
            if isinstance(error, (SandboxError, EnvError)):
                self._raised[number] = error
            fields = {n: v for n, v in vars(error).items() if isinstance(v, (str, int)) and n != "message"}
            text = error.message if isinstance(error, Error) else str(error)
            answer = {"id": number, "error": {"type": type(error).__name__, "message": text, "fields": fields}}
        finally:
            self._places.release()
        try:
            await self._send(answer)
        except PathError:
            pass  # the check ended without waiting for this answer

    async def _call(self, name: str, args: list[Any], options: dict[str, Any]) -> Any:
        bounded = {key: min(int(value), _MOST[key]) if key in _MOST else value for key, value in options.items()}
        if name == "rollout" and args[0] in _LARGE:
            return getattr(self._rollout, args[0])
        if name.startswith("job.") and name[4:] in _JOB_CALLS:
            job = await self._sandbox.job(args[0])
            return await getattr(job, name[4:])(*args[1:], **bounded)
        if name == "start":
            self._jobs += 1
            if self._jobs > _MOST_JOBS:
                raise Unsupported(f"a verifier that runs in a sandbox may start {_MOST_JOBS} jobs", hint="use exec")
        if name not in _CALLS:
            raise Unsupported(
                f"{name!r} is not for a verifier that runs in a sandbox", hint="--trust-tasks runs it outside"
            )
        return await getattr(self._sandbox, name)(*args, **bounded)


def sandboxed_python(
    spec: VerifierSpec, backend: Backend, place: SandboxSpec, tools: tuple[str, ...] = ()
) -> PythonVerifier:
    """The check of a task's file, to be called as every verifier. `place` is opened for its code alone; `tools` are
    directories of programs before those of the image."""
    file, name = read_file_reference(spec)

    async def check(sandbox: Sandbox, rollout: Rollout) -> Verdict:
        if not backend.capabilities.stdin:
            raise VerifierError(
                f"backend {backend.name!r} cannot run the Python verifier of a task from elsewhere: its programs have no stdin",
                hint="--trust-tasks runs it in this process",
            )
        async with backend.open(_without_network(place)) as box:
            code = importlib.resources.files("rollyard.inside").joinpath("python_check.py").read_bytes()
            await box.mkdir(FOLDER)
            await box.write(f"{FOLDER}/run.py", code, mode=0o644)
            await box.write(f"{FOLDER}/check.py", file.read_bytes(), mode=0o644)
            path = ":".join((*tools, place.env.get("PATH") or DEFAULT_PATH))
            command = ["/usr/bin/env", "python3", "-I", f"{FOLDER}/run.py", f"{FOLDER}/check.py", name]
            job = await box.start(command, env={"PATH": path}, cwd="/", stdin=True)
            return await _Link(job, sandbox, rollout).talk()

    check.__name__ = name
    return PythonVerifier(check)


def read_file_reference(spec: VerifierSpec) -> tuple[Path, str]:
    """The file and the function; a module is refused: which file that is depends on the host."""
    reference = read_reference(spec)
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        raise ConfigError(
            f"verifier {reference!r} is a module of this machine, and the task comes from elsewhere",
            hint="ref = 'FILE.py:NAME' runs in a sandbox; --trust-tasks lets these tasks reach this machine",
        )
    return Path(file), name


def _without_network(place: SandboxSpec) -> SandboxSpec:
    return msgspec.structs.replace(
        place, env={}, mounts=(), network="none", allowed_hosts=(), lifetime="owner",
        labels={**place.labels, "rollyard.role": "verifier-code"},
        resources=msgspec.structs.replace(place.resources, gpus=None, gpu_types=()),
    )  # fmt: skip


async def _lines(job: Job) -> AsyncIterator[bytes]:
    kept = bytearray()
    async for _, data in job.stream():
        kept += data
        *whole, rest = kept.split(b"\n") if b"\n" in data else (kept,)
        for line in whole:
            yield bytes(line)
        kept = rest
        if len(kept) > MESSAGE_BYTES:
            raise VerifierError(f"the verifier's code sent a message of more than {MESSAGE_BYTES} bytes")


def _read_message(line: bytes) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(line, type=dict[str, Any])
        msgspec.convert(message.get("id", 0), int)
    except BAD_JSON as error:
        raise VerifierError(f"the verifier's code sent a message that is none: {error}") from error
    return message


def _as_verdict(found: Any) -> Verdict:
    """A verdict by its fields, as numbers where numbers are meant; anything else by the rules of every check."""
    if not isinstance(found, _Object):
        return as_verdict(found)
    if found.type != "Verdict":
        return Verdict(status="failed", error=f"the verifier gave a {found.type}, not a Verdict or a number")
    fields = dict(found.fields)
    for name, kind in (("parts", float), ("checks", bool)):
        fields[name] = {
            str(key): cast("Callable[[Any], Any]", kind)(item) for key, item in dict(fields.get(name) or {}).items()
        }
    if fields.get("reward") is not None:
        given = as_verdict(fields["reward"])
        if given.reward is None:
            return given
        fields["reward"] = given.reward
    return msgspec.convert({name: fields[name] for name in Verdict.__struct_fields__ if name in fields}, Verdict)


class _Object(msgspec.Struct, frozen=True):
    type: str
    fields: Mapping[str, Any]


def _encode_fields(kind: str, fields: Mapping[str, Any]) -> Any:
    return {"object": kind, "fields": {name: _encode(value) for name, value in fields.items()}}


def _encode(value: Any) -> Any:
    """As `encode` of the other side; values of ours go by their fields."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {"map": [[_encode(name), _encode(item)] for name, item in items]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item) for item in cast("list[Any]", value)]}
    if isinstance(value, msgspec.Struct):
        return _encode_fields(type(value).__name__, msgspec.structs.asdict(value))
    return _encode_fields("Job", {"id": value.id})


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    if "object" in given:
        return _Object(str(given["object"]), {name: _decode(item) for name, item in given["fields"].items()})
    ((tag, content),) = given.items()
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "float":
        return float(content)
    if tag == "map":
        return {_decode(name): _decode(item) for name, item in content}
    return [_decode(item) for item in content]
