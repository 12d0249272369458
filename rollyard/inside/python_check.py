"""Runs the Python verifier of a task from elsewhere, in a sandbox of its own: `python3 -I FILE CHECK.py NAME`.

What the function is given stands for things on the other side: calls of `sandbox` go out as lines of JSON on what was stdout, and
answers come in on stdin. The host's side is `tasks/verifiers/sandboxed_python.py`. `rollyard` has here the names that verifiers
use, and nothing behind them. Standard library alone, under Python 3.9 or newer.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_BRANCHES = ("ConfigError", "SandboxError", "VerifierError", "EnvError")
_OF_SANDBOXES = (
    "SandboxUnavailable",
    "SandboxInterrupted",
    "StreamDropped",
    "SandboxGone",
    "CommandTimeout",
    "CommandFailed",
    "PathError",
)


class Error(Exception):
    """As `rollyard.Error`. `call` is the number of the call that it answered."""

    call: int | None = None
    hint: str | None = None

    @property
    def message(self) -> str:
        return str(self)


errors = types.ModuleType("rollyard.core.errors")
errors.Error = Error  # type: ignore[attr-defined]
for _name in _BRANCHES:
    setattr(errors, _name, type(_name, (Error,), {}))
for _name in _OF_SANDBOXES:
    setattr(errors, _name, type(_name, (errors.SandboxError,), {}))


class Verdict:
    def __init__(self, **fields: Any) -> None:
        unknown = set(fields) - {"reward", "status", "grade", "safe_path", "parts", "checks", "log", "error"}
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
        self.__dict__.update({"reward": None, "status": "scored", "parts": {}, "checks": {}, "log": "", "error": None})
        self.__dict__.update(fields)


class Value(types.SimpleNamespace):
    """A value of the host's, by its fields."""


class Exit(Value):
    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        return (self.stdout + self.stderr).decode("utf-8", "backslashreplace")


class Link:
    """Calls to the host, each with a number; a thread hands out the answers."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._lock, self._waiting, self._count = threading.Lock(), {}, 0

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> Any:
        return json.loads(self._source.readline())

    def send(self, message: Any) -> None:
        with self._lock:
            self._target.write(json.dumps(message).encode() + b"\n")
            self._target.flush()

    def call(self, name: str, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            self._waiting[number] = done
        self.send({"id": number, "call": name, "args": encode(list(args)), "options": encode(options)})
        return done

    async def ask(self, name: str, *args: Any, **options: Any) -> Any:
        return await asyncio.wrap_future(self.call(name, *args, **options))

    def _read(self) -> None:
        for line in self._source:
            answer = json.loads(line)
            done = self._waiting.pop(answer["id"])
            if not done.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                done.set_exception(_error(answer))
            else:
                done.set_result(decode(answer["value"], self))


def _error(answer: Any) -> Exception:
    said = answer["error"]
    known = getattr(errors, said["type"], None) or {"TypeError": TypeError, "TimeoutError": TimeoutError}.get(
        said["type"]
    )
    error = (known or Error)(said["message"])
    error.__dict__.update(said["fields"], call=answer["id"])
    return error


class Sandbox:
    """The judge's sandbox. Folders do not travel: there is no folder of the host here to name."""

    def __init__(self, link: Link, fields: dict[str, Any]) -> None:
        self._link = link
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._link.ask(name, *args, **options)

        return call


class Job:
    def __init__(self, link: Link, job_id: str) -> None:
        self._link, self.id = link, job_id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._link.ask(f"job.{name}", self.id, *args, **options)

        return call


class Rollout(Value):
    """Its small fields came along; the others are fetched when they are read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._link.call("rollout", name).result()
        setattr(self, name, value)
        return value


def encode(value: Any) -> Any:
    """What JSON cannot say gets a tag, and so does every object, by the name of its type."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, dict):
        return {"map": [[encode(name), encode(item)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [encode(item) for item in value]}
    fields = vars(value) if isinstance(value, Verdict) else {}
    return {"object": type(value).__name__, "fields": {name: encode(item) for name, item in fields.items()}}


def decode(value: Any, link: Link) -> Any:
    if not isinstance(value, dict):
        return value
    if "object" in value:
        fields = {name: decode(item, link) for name, item in value["fields"].items()}
        if value["object"] == "Job":
            return Job(link, fields["id"])
        if value["object"] == "Rollout":
            return Rollout(_link=link, **fields)
        return (Exit if value["object"] == "Exit" else Value)(**fields)
    ((tag, content),) = value.items()
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "float":
        return float(content)
    if tag == "map":
        return {decode(name, link): decode(item, link) for name, item in content}
    items = [decode(item, link) for item in content]
    return items if tag == "list" else tuple(items)


def _verifier(check: Any = None, **options: Any) -> Any:
    def keep(function: Any) -> Any:
        return function

    return check if check is not None else keep


def _offer_names() -> None:
    """`import rollyard as ry`, as far as a verifier needs it."""

    def missing(name: str) -> Any:
        raise AttributeError(
            f"rollyard.{name} is not there for a verifier that runs in a sandbox (--trust-tasks runs it outside)"
        )

    root, core, rollout = (types.ModuleType(f"rollyard{name}") for name in ("", ".core", ".core.rollout"))
    root.__dict__.update(
        {
            "verifier": _verifier,
            "Verdict": Verdict,
            "Error": Error,
            "core": core,
            "__path__": [],
            "__getattr__": missing,
        }
    )
    core.__dict__.update({"errors": errors, "rollout": rollout, "__path__": []})
    rollout.__dict__.update({"Verdict": Verdict, "Rollout": Rollout})
    for module in (root, core, rollout, errors):
        sys.modules[module.__name__] = module


async def _judge(file: str, name: str, sandbox: Sandbox, rollout: Any) -> Any:
    spec = importlib.util.spec_from_file_location("rollyard_file_check", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name)(sandbox, rollout)
    return await found if inspect.isawaitable(found) else found


def main() -> None:
    link = Link(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what the code prints is no message
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _offer_names()
    given = link.receive()
    sandbox, rollout = Sandbox(link, decode(given["sandbox"], link)), decode(given["rollout"], link)
    link.start()
    try:
        ended = {"gives": encode(asyncio.run(_judge(sys.argv[1], sys.argv[2], sandbox, rollout)))}
    except Exception as error:  # noqa: BLE001 - the author's code; its error is the evidence
        failed = f"{sys.argv[2]}: {type(error).__name__}: {error}"
        ended = {"failed": failed, "log": traceback.format_exc(), "call": getattr(error, "call", None)}
    link.send(ended)


if __name__ == "__main__":
    main()
