"""What of a task's answer its agent could read: solutions, tests, later commits and the judge's paths, looked for in the
agent's own sandbox before it starts (`inside/leak_probe.py`)."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal

import anyio
import msgspec

from rollyard.core.errors import Error
from rollyard.core.protocols import Backend
from rollyard.core.scratch import scratch
from rollyard.core.task import Task
from rollyard.policy.scripted_policy import scripted
from rollyard.runs.rollout.provision import Provision
from rollyard.runs.rollout.run_rollout import run_rollout
from rollyard.tasks.lint import TaskFinding

_SCRIPT = """#!/bin/bash
here=$(dirname "$0")
exec "$(command -v python3 || command -v python)" "$here/probe.py" "$here/needles.json"
"""
_SHORTEST_LINE = 24
_SMALLEST_FILE = 32
_MOST_TOLD = 50
_LARGEST_SOLUTION = 2**20
_PATCHED = re.compile(r"^\+\+\+ (?:b/)?(\S+)", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\d+", re.MULTILINE)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(?P<end>\w+)['\"]?.*\n([\s\S]*?)^\s*(?P=end)\s*$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w{5,}")
_MEANING: dict[str, tuple[Literal["error", "warning"], str]] = {
    "solution": ("error", "the agent can read its answer"),
    "tests": ("warning", "the agent can read a test that it is judged by"),
    "history": ("warning", "the agent can read later commits"),
    "judge": ("warning", "the agent can read where it is judged"),
    "compiled": ("warning", "the agent can read compiled code of another version"),
}


async def find_leaks(
    task: Task,
    backend: Backend,
    provision: Provision,
    *,
    network: str,
    build_network: str | None,
    pull: tuple[str, ...] = (),
    allow_unsafe: bool,
) -> list[TaskFinding]:
    """One rollout of a probe in the agent's place, without a verdict."""
    needles = await anyio.to_thread.run_sync(make_needles, task)
    with scratch("probe") as folder:
        await anyio.to_thread.run_sync(_write_probe, folder, needles)
        steps = tuple(msgspec.structs.replace(step, solution=str(folder), verifier=None) for step in task.steps[:1])
        probe = msgspec.structs.replace(task, solution=str(folder), solution_env={}, verifier=None, steps=steps)
        try:
            done = await run_rollout(
                probe,
                agent="oracle",
                policy=scripted([]),
                sandbox=backend,
                provision=provision,
                network=network,
                build_network=build_network,
                pull=pull,
                allow_unsafe=allow_unsafe,
            )
        except Error:
            return []  # the proofs say so
    if done.failure is not None and done.failure.stage in ("provision", "install", "prepare"):
        return []  # the proofs say so
    return list(read_findings(done.log.decode("utf-8", "replace")))


def make_needles(task: Task) -> dict[str, Any]:
    """What to look for, by content: files of the tests and the solution; lines that a patch adds, a script writes by a
    here-document or a solution's file has; words that a patch brings in."""
    files: dict[str, str] = {}
    sizes: set[int] = set()
    groups: list[list[str]] = []
    patches: list[int] = []
    words: set[str] = set()
    modules: set[str] = set()
    wanted = {
        line.strip()
        for text in (task.instruction, *(step.instruction for step in task.steps))
        for line in text.splitlines()
    }
    given = _list_given_files(task)
    for kind, folder in _folders(task):
        reverse = kind == "solution" and _applies_reversed(folder)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            data = path.read_bytes()
            if len(data) >= _SMALLEST_FILE:
                files[hashlib.sha256(data).hexdigest()] = f"{kind}/{path.relative_to(folder)}"
                sizes.add(len(data))
            if kind == "solution":
                text = data[:_LARGEST_SOLUTION].decode("utf-8", "replace")
                answer = _undo(text) if reverse else text
                own = set[str]().union(*(lines for name, lines in given if name == path.name))
                found = _groups(answer, wanted | own, [lines for _, lines in given])
                if _HUNK.search(answer):
                    patches += range(len(groups), len(groups) + len(found))
                groups += found
                words |= _words(answer)
                modules |= {_module(path), *(_module(PurePosixPath(name)) for name in _PATCHED.findall(answer))}
    values = {value for value in task.solution_env.values() if value not in task.env.values()}
    return {
        "files": files, "sizes": sorted(sizes), "groups": groups, "patches": patches, "words": sorted(words),
        "modules": sorted(modules), "values": sorted(values),
    }  # fmt: skip


def _module(path: PurePath) -> str:
    """The last part of the name that a file is imported by; of a package's own file, the package's."""
    return path.parent.name if path.stem == "__init__" else path.stem


def _list_given_files(task: Task) -> list[tuple[str, set[str]]]:
    """Name and lines of what the agent is given: a file with a fault or a gap has most lines of its repair."""
    inline = [(PurePosixPath(file.path).name, file.data) for file in task.files if file.data is not None]
    roots = [Path(root) for root in (task.build, *(file.source for file in task.files)) if root is not None]
    found = [
        path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*"))) if path.is_file()
    ]
    files = (*inline, *((path.name, path.read_bytes()[:_LARGEST_SOLUTION]) for path in found))
    return [(name, {line.strip() for line in data.decode("utf-8", "replace").splitlines()}) for name, data in files]


def _folders(task: Task) -> Iterator[tuple[str, Path]]:
    specs = [task.verifier, *(step.verifier for step in task.steps)]
    for folder in {folder for spec in specs if spec is not None for folder in spec.tests}:
        yield "tests", Path(folder)
    for folder in {task.solution, *(step.solution for step in task.steps)} - {None}:
        yield "solution", Path(str(folder))


def _applies_reversed(solution: Path) -> bool:
    """Whether its patch is the fault, and undoing it the answer."""
    script = solution / "solve.sh"
    return script.is_file() and "git apply -R" in script.read_text(errors="replace")


def _undo(text: str) -> str:
    """A patch the other way round; a text that is none stays."""
    if not _HUNK.search(text):
        return text
    other = {"+": "-", "-": "+"}
    return "\n".join(
        line if line.startswith(("+++", "---")) else other.get(line[:1], line[:1]) + line[1:]
        for line in text.splitlines()
    )


def _groups(text: str, shown: set[str], given: list[set[str]]) -> list[list[str]]:
    """Lines that are found together where the answer is: of a patch those that it adds, of a script its here-documents and
    itself, of another file itself. What was `shown` already, by the question or in a file of that name, is no answer; nor are
    the lines of a `given` file of another name that has most of them and lacks some: it is what has to be repaired."""
    patch = _list_added(text)
    parts = [patch] if patch else [text.splitlines(), *(body.splitlines() for _, body in _HEREDOC.findall(text))]
    long = [{line.strip() for line in part if len(line.strip()) >= _SHORTEST_LINE} - shown for part in parts]
    if not patch:
        long = [lines - set[str]().union(*(one for one in given if _is_faulty(one, lines))) for lines in long]
    return [sorted(lines) for lines in long if lines]


def _is_faulty(given: set[str], answer: set[str]) -> bool:
    return len(answer) / 2 <= len(given & answer) < len(answer)


def _list_added(text: str) -> list[str]:
    """Of a patch, or of one inside a script."""
    if not _HUNK.search(text):
        return []
    lines = text[_HUNK.search(text).start() :].splitlines()  # pyright: ignore[reportOptionalMemberAccess]
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    taken = {line[1:].strip() for line in lines if line.startswith(("-", " "))}
    return [line for line in added if line not in taken]


def _words(text: str) -> set[str]:
    added = " ".join(_list_added(text))
    taken = set(_WORD.findall("\n".join(line for line in text.splitlines() if not line.startswith("+"))))
    return set(_WORD.findall(added)) - taken


def _write_probe(folder: Path, needles: dict[str, Any]) -> None:
    (folder / "solve.sh").write_text(_SCRIPT)
    (folder / "probe.py").write_bytes(
        importlib.resources.files("rollyard.inside").joinpath("leak_probe.py").read_bytes()
    )
    (folder / "needles.json").write_text(json.dumps(needles))


def read_findings(log: str) -> Iterator[TaskFinding]:
    """The probe's own lines; a sandbox where it could not look is reported."""
    rows = [row for line in log.splitlines() if line.startswith("{") and isinstance(row := _decode(line), dict)]
    leaks = [row for row in rows if row.get("leak") in _MEANING]
    for row in leaks[:_MOST_TOLD]:
        level, meaning = _MEANING[row["leak"]]
        yield TaskFinding(level=level, where="leak", message=f"{meaning}: {row['where']} {row['message']}")
    if len(leaks) > _MOST_TOLD:
        yield TaskFinding(level="warning", where="leak", message=f"and {len(leaks) - _MOST_TOLD} more")
    if not any("looked" in row for row in rows):
        last = log.strip()[-200:]
        yield TaskFinding(level="warning", where="leak", message=f"not looked for: the probe did not end: {last}")
    elif any("cut" in row for row in rows):
        yield TaskFinding(level="warning", where="leak", message="not all of the sandbox was looked at: too many files")


def _decode(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
