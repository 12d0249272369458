"""What can be said about a task without running it: a list of findings, each with the file it is about."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.core.protocols import Policy, Verifier
from rollyard.core.task import Task, VerifierSpec
from rollyard.tasks.agent_imports import find_agent_imports
from rollyard.tasks.harbor.compose import read_services
from rollyard.tasks.host_variables import references
from rollyard.tasks.layers import layer_spec
from rollyard.tasks.verifiers import verifier_for
from rollyard.tasks.verifiers.python import PythonVerifier
from rollyard.tasks.verifiers.sandboxed_python import read_file_reference

_NETWORK = re.compile(r"\b(curl|wget|pip3? install|uvx?|apt(-get)? install|npm (i|install|ci)|git clone)\b")
_LARGE = 50 * 2**20
_SHORT = 20


class TaskFinding(msgspec.Struct, frozen=True, kw_only=True):
    """An `error` makes the task unusable or its reward untrue; a `warning` is worth a look."""

    level: Literal["error", "warning"]
    where: str
    message: str


def size_of(task: Task) -> tuple[int, int]:
    """Files and bytes of the task's folder."""
    if task.source is None:
        return 0, 0
    sizes = [path.stat().st_size for path in Path(task.source).rglob("*") if path.is_file() and not path.is_symlink()]
    return len(sizes), sum(sizes)


def lint(task: Task, *, policy: Policy | None = None) -> list[TaskFinding]:
    return [*_instructions(task), *_verifiers(task, policy), *_place(task), *_solutions(task)]


def _warn(where: str, message: str) -> TaskFinding:
    return TaskFinding(level="warning", where=where, message=message)


def _error(where: str, message: str) -> TaskFinding:
    return TaskFinding(level="error", where=where, message=message)


def _instructions(task: Task) -> Iterator[TaskFinding]:
    texts = {f"steps/{s.name}/instruction.md": s.instruction for s in task.steps} or {
        "instruction.md": task.instruction
    }
    for where, text in texts.items():
        if len(text.strip()) < _SHORT:
            yield _warn(where, "says hardly anything")
        if "/tests" in text or "/solution" in text or "/logs/verifier" in text:
            yield _warn(where, "speaks of the judge's own files, which the agent does not have")


def _verifiers(task: Task, policy: Policy | None) -> Iterator[TaskFinding]:
    specs = {f"steps/{s.name}": s.verifier for s in task.steps} or {"verifier": task.verifier}
    for where, spec in specs.items():
        if spec is None:
            yield _error(where, "there is no verifier, so there is never a reward")
            continue
        try:
            if spec.kind != "judge" or policy is not None:
                verifier_for(spec, policy, sandboxed=None if task.trusted else _look_at_reference)
            for layer in (*task.layers, *spec.layers):
                layer_spec(layer)
        except ConfigError as error:
            yield _error(where, str(error))
        if spec.grade == "shared":
            yield _warn(
                where,
                "is judged in the agent's own file system, where system files may be replaced; see docs/verifiers.md",
            )
        for name in references(spec.env):
            if name not in os.environ:
                yield _warn(where, f"needs {name}, which is not set here")
        if not spec.safe_path:
            yield _warn(where, "lets modules of the working directory stand before Python's own (safe_path = false)")
        for file, what in find_agent_imports(task, spec):
            message = f"loads the agent's code into the tests' own process ({what}), which can forge the result"
            yield _warn(file, f"{message}; run it in a process of its own and compare what it prints")
        yield from _tests(task, spec)


def _look_at_reference(spec: VerifierSpec) -> Verifier:
    """Code of an author who is not trusted is not loaded here, only found."""
    file, name = read_file_reference(spec)
    if not file.is_file():
        raise ConfigError(f"verifier {file}:{name}: the file is not there")
    return PythonVerifier(lambda sandbox, rollout: None)


def _tests(task: Task, spec: VerifierSpec) -> Iterator[TaskFinding]:
    """The test script: where it writes its reward, and whether it counts on a network."""
    if spec.kind != "harbor":
        return
    for directory in spec.tests:
        script = Path(directory) / "test.sh"
        if not script.is_file():
            continue
        where, text = str(script.relative_to(task.source or "/")), script.read_text(errors="replace")
        if re.search(r"\brewards\.json\b", text):
            yield _error(where, "writes rewards.json; the file that is read is reward.json")
        elif not re.search(r"reward\.(txt|json)", text) and "reward" not in text:
            yield _warn(where, "does not seem to write a reward")
        if not text.startswith("#!"):
            yield _warn(where, "has no #! line, so the shell that runs it is a matter of luck")
        if _NETWORK.search(text) and (spec.network or task.network or "none") == "none":
            yield _warn(where, "seems to fetch something, and the verifier has no network")


def _place(task: Task) -> Iterator[TaskFinding]:
    if task.os == "windows":
        yield _error("task.toml", "asks for Windows, which no backend has")
    if task.compose is not None:
        try:
            read_services(task.compose)
        except ConfigError as error:
            yield _error("environment", str(error))
        yield _warn("environment", "has several services; backends that have none refuse the task")
    if task.resources.accelerated:
        yield _warn("task.toml", "asks for accelerators; backends without them refuse the task")
    if task.network == "host":
        yield _warn("task.toml", "asks for the public network, and gets none unless --network says public")
    for name in references(task.env):
        if name not in os.environ:
            yield _warn("task.toml", f"environment.env needs {name}, which is not set here")
    files, size = size_of(task)
    if size > _LARGE:
        yield _warn(".", f"is {size / 2**20:.0f} MB in {files} files")


def _solutions(task: Task) -> Iterator[TaskFinding]:
    folders = {f"steps/{s.name}/solution": s.solution for s in task.steps} or {"solution": task.solution}
    for where, folder in folders.items():
        if folder is None:
            yield _warn(where, "is missing, so nothing proves that the task can be solved")
