"""What judges a task, as far as the agent can see it: test files by their names, and what the task's own commands run and read.

A check may have any name. It is found by following the commands of the instruction and of the verifier: `make check` to its
recipe, `npm test` to its script, from there to the file or module that is run, its folder and the data it names, one by one or
by a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import msgspec

from rollyard.core.task import Task, VerifierSpec
from rollyard.runs.scan.permission import names_file

_TEST_FILE = re.compile(r"^(test_.*|.*_test|.*\.test|.*\.spec|.*_spec|.*Tests?)\.\w+$|^conftest\.py$|^.*\.(?:t|bats)$")
_TEST_FOLDERS = {"tests", "test", "__tests__", "spec", "specs", "t", "e2e"}
_SETTINGS = re.compile(
    r"^(?:conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|(?:jest|vitest|playwright|karma|ava|cypress)\.config\.\w+|\.mocharc\.\w+|\.taprc"
    r"|phpunit\.xml\S*|\.rspec|nextest\.toml)$"
)
_CHECKS = re.compile(
    r"(?:^|[^a-z])(?:checks?|checker|tests?|specs?|verify|verifier|validate|validator|eval|grade|grader|grading|compare|acceptance|suite|smoke)(?![a-z])"
)
_QUOTED = re.compile(r"`([^`\n]{1,300})`")
_RUN = re.compile(
    r"(?:^|[\s;&|(@])(?:(?:python|pypy)[\d.]*|node|deno|bun|ruby|perl|php|sh|bash|dash|pytest|prove|bats|lua)\s+(?:-\S+\s+)*([\w./-]+)"
    r"|(?:^|[\s;&|(@])\./([\w./-]+)"
)
_MODULES = re.compile(r"-m\s+(?:unittest|pytest|nose2?|doctest)\s+((?:[\w./:-]+[ \t]*)+)")
_MAKE = re.compile(r"\b(?:make|gmake|just)\s+(?:-\S+\s+)*([\w-]+)")
_NPM = re.compile(r"\b(?:npm|yarn|pnpm|bun)\s+(?:run\s+)?([\w:-]+)")
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")  # in the order in which make looks for them
_PATTERN = re.compile(
    r"([\w.-]+(?:/[\w.-]+)*)/\*|['\"]([\w./-]+)['\"]\)+\.(?:r?glob|iterdir)\(|listdir\(['\"]([\w./-]+)['\"]"
)
DATA = re.compile(r"\.(?:in|json|jsonl|csv|tsv|txt|ya?ml|xml|sql|out|golden|snap|dat|html)$")


class Judges(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are the task's own files that judge it, with their texts: those that have the name of a test, and the others."""

    files: Mapping[str, str]
    there: frozenset[str]  # all files of the task

    def has(self, path: str) -> bool:
        return is_test(path) or path in self.files

    @property
    def text(self) -> str:
        return "\n".join(self.files.values())

    @property
    def folders(self) -> frozenset[str]:
        """Where a module stands before others of its name, for what is run there."""
        return frozenset(str(PurePosixPath(path).parent) for path in self.files if path.endswith(".py")) - {"."}

    def name_in(self, line: str) -> str | None:
        """The file that a line of code names in quotes and that is no source of it: data or a program of the checks."""
        return next((path for path in self.files if re.search(rf"['\"/]{_name(path)}['\"]", line)), None)


def is_test(path: str) -> bool:
    found = PurePosixPath(path)
    return (
        bool(_TEST_FILE.match(found.name) or _SETTINGS.match(found.name))
        or not _TEST_FOLDERS.isdisjoint(found.parts[:-1])
    )  # fmt: skip


def find_judges(task: Task) -> Judges:
    files = task_texts(task)
    work = _QUOTED.sub(" ", task.instruction)
    found = {path for path in files if is_test(path)}
    for path in _run_by(task, files):
        if path in files and not names_file(work, path):
            found.add(path)
    for path in tuple(found):
        folder = PurePosixPath(path).parent
        if _CHECKS.search(folder.name.lower()):
            found |= {other for other in files if PurePosixPath(other).parent == folder}
        text = files[path]
        read = {folder.removeprefix("./") for found_in in _PATTERN.findall(text) for folder in found_in if folder}
        found |= {
            other
            for other in files
            if DATA.search(other)
            and not names_file(work, other)
            and (str(PurePosixPath(other).parent) in read or re.search(rf"['\"/]{_name(other)}['\"]", text))
        }
    return Judges(files={path: files[path] for path in sorted(found)}, there=frozenset(files))


def task_texts(task: Task) -> dict[str, str]:
    """The task's own files, by their paths in the working directory."""
    workdir = (task.workdir or "/app").rstrip("/") + "/"
    return {
        file.path.removeprefix(workdir): file.data.decode("utf-8", "replace")
        for file in task.files
        if file.data is not None
    }


def recipe(makefile: str, target: str) -> str:
    """What make runs for a target."""
    lines, inside = list[str](), False
    for line in makefile.splitlines():
        if line[:1] not in ("\t", " ", ""):
            inside = re.match(rf"(?:[\w./-]+\s+)*{re.escape(target)}\s*(?:[\w./ -]*):", line) is not None
        if inside:
            lines.append(line)
    return "\n".join(lines)


def check_targets(task: Task) -> set[str]:
    """The targets of make that the task is judged by."""
    return {name for command in _commands(task) for name in _MAKE.findall(command) if _CHECKS.search(name.lower())}


def _commands(task: Task) -> Iterator[str]:
    yield from _QUOTED.findall(task.instruction)
    for verifier in [task.verifier, *(step.verifier for step in task.steps)]:
        yield from _verify_commands(verifier)


def _verify_commands(verifier: VerifierSpec | None) -> Iterator[str]:
    commands = verifier.options.get("commands") if verifier is not None else None
    if isinstance(commands, (list, tuple)):
        yield from (str(command) for command in commands)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _run_by(task: Task, files: Mapping[str, str]) -> Iterator[str]:
    """Files that the task's commands run, where the file or the command is called a check."""
    texts = [(command, False) for command in _commands(task)]
    makefile = next((files[name] for name in MAKEFILES if name in files), "")
    texts += [(recipe(makefile, target), True) for target in check_targets(task)]
    for command, _ in tuple(texts):
        for script in _NPM.findall(command):
            if _CHECKS.search(script) and (
                found := re.search(rf'"{re.escape(script)}"\s*:\s*"([^"]*)"', files.get("package.json", ""))
            ):
                texts.append((found[1], True))  # fmt: skip
    for text, is_check in texts:
        for found in _RUN.finditer(text):
            path = (found[1] or found[2]).removeprefix("./")
            if is_check or _CHECKS.search(path.lower()):
                yield path
        for found in _MODULES.finditer(text):
            for word in found[1].split():
                parts = word.partition("::")[0].removesuffix(".py").replace("/", ".").split(".")
                yield from ("/".join(parts[:end]) + ".py" for end in range(len(parts), 0, -1))


def _name(path: str) -> str:
    return re.escape(PurePosixPath(path).name)
