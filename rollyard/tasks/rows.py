"""Tasks from plain values: a string, a mapping, a JSONL file, a Python module.

A mapping has the fields of `Task`, and a few shorthands: `files` as `{path: text}`, `verify` as a list of commands (or one),
`limits` as a table. A row without an id is named by its content, so that the same row is the same task anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from rollyard.core import registry
from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError, Error
from rollyard.core.python_files import import_file
from rollyard.core.remote_task import TaskConfig
from rollyard.core.sequences import as_commands
from rollyard.core.task import File, Task, VerifierSpec
from rollyard.tasks.harbor.digest import task_digest
from rollyard.tasks.harbor.taskfile import field_error
from rollyard.tasks.verifiers import remote
from rollyard.tasks.verifiers.python import spec_of

Mark = Callable[[Task], Task]  # what is done with a task before any file is read that it names


def as_task(value: Any, *, where: str = "task", mark: Mark | None = None) -> Task:
    """A `Task` out of a task, an instruction, a remote task's config or a mapping. `where` names the row in errors."""
    if isinstance(value, TaskConfig):
        return finish(Task(id=value.task_key, instruction=value.prompt, remote=value), mark)
    if isinstance(value, Task):
        return finish(value, mark)
    if isinstance(value, str):
        return finish(Task(id="", instruction=value), mark)
    if isinstance(value, Mapping):
        return finish(_from_mapping(cast("Mapping[str, Any]", value), where), mark)
    raise ConfigError(f"{where}: a task is a Task, a string, a mapping or a TaskConfig, not {type(value).__name__}")


def finish(task: Task, mark: Mark | None = None) -> Task:
    """Fill in the digest, and a name made of it where there is none. A verifier may be a function, or the name of a kind; a
    remote task brings its own."""
    if task.remote is not None and task.remote.verifier_code and task.verifier is None:
        task = msgspec.structs.replace(task, verifier=remote.SPEC)
    if task.verifier is not None and not isinstance(task.verifier, VerifierSpec):
        task = msgspec.structs.replace(task, verifier=_verifier(task.verifier))
    if mark is not None:
        task = mark(task)
    if not task.digest:
        task = msgspec.structs.replace(task, digest=task_digest(task))
    if not task.id:
        task = msgspec.structs.replace(task, id=f"task-{task.digest.removeprefix('sha256:')[:12]}")
    if not task.id.isprintable():
        raise ConfigError(f"{task.id!r} is no name for a task", hint="printable UTF-8 characters")
    return task


def _verifier(given: Any) -> Any:
    if isinstance(given, str):
        return VerifierSpec(kind=given)
    return spec_of(cast("Callable[..., Any]", given)) if callable(given) else given


def _from_mapping(row: Mapping[str, Any], where: str) -> Task:
    fields = dict(row)
    if isinstance(fields.get("remote"), Mapping):
        fields["remote"] = TaskConfig.read(fields["remote"])
        fields.setdefault("instruction", fields["remote"].prompt)
        fields.setdefault("id", fields["remote"].task_key)
    if "instruction" not in fields and not fields.get("steps"):
        raise ConfigError(f"{where}: instruction: the task has none")
    fields.setdefault("id", "")
    fields.setdefault("instruction", "")
    fields["id"] = str(fields["id"])
    if isinstance(fields.get("files"), Mapping):
        fields["files"] = [_file(path, content) for path, content in fields["files"].items()]
    if isinstance(fields.get("setup"), str):
        fields["setup"] = as_commands(fields["setup"], f"{where}: setup")
    verify = fields.pop("verify", None)
    verifier = fields.get("verifier")
    if verify is not None:
        if verifier is not None:
            raise ConfigError(f"{where}: verify and verifier are two ways to say one thing; give one")
        commands = as_commands(verify, f"{where}: verify")
        fields["verifier"] = VerifierSpec(kind="commands", options={"commands": list(commands)})
    else:
        fields["verifier"] = _verifier(verifier)
    unknown = set(fields) - set(Task.__struct_fields__) | (fields.keys() & {"trusted", "host_env"})
    if unknown:
        known = ", ".join((*(name for name in Task.__struct_fields__ if name not in ("trusted", "host_env")), "verify"))
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}; the fields are {known}")
    try:
        return msgspec.convert(fields, Task, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {field_error(error)}") from error


def _file(path: str, content: Any) -> Any:
    if isinstance(content, str):
        return File(path=path, data=content.encode())
    if isinstance(content, (bytes, bytearray)):
        return File(path=path, data=bytes(content))
    return {"path": path, **content} if isinstance(content, Mapping) else content


def from_jsonl(path: Path, mark: Mark | None = None) -> Iterator[Task]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = msgspec.json.decode(line)
            except BAD_JSON as error:
                raise ConfigError(f"{where}: not JSON: {error}") from error
            yield as_task(row, where=where, mark=mark)


def from_fleet(path: Path, mark: Mark | None = None) -> Iterator[Task]:
    """Every task of a file as Fleet's tools write it: one task, a list of them, or `{"tasks": [...]}`."""
    for number, config in enumerate(TaskConfig.all_from_json_file(path)):
        yield as_task(config, where=f"{path}[{number}]", mark=mark)


def from_python(reference: str) -> Iterator[Task]:
    """`module:attr`, `file.py` (its `taskset`, `tasks` or `load`) or `file.py:attr`: an iterable, or a call that gives one."""
    name, _, attribute = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    if name.endswith(".py"):
        module = import_file(Path(name))
        found = [a for a in ([attribute] if attribute else ["taskset", "tasks", "load"]) if hasattr(module, a)]
        if not found:
            raise ConfigError(f"{name}: no {attribute or 'taskset, tasks or load'} in this file")
        value = getattr(module, found[0])
    else:
        value = registry.load("rollyard.tasksets", reference)
    yield from rows_of(value, reference)


def rows_of(value: Any, where: str) -> Iterator[Task]:
    for _ in range(2):  # a class gives an object, an object may have to be called
        if callable(value) and not isinstance(value, Task):
            try:
                value = value()
            except Error:
                raise
            except Exception as error:  # the user's own code: any error becomes one that names the taskset
                raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if isinstance(value, (str, Mapping, Task, TaskConfig)):
        value = [value]
    if not isinstance(value, Iterable):
        raise ConfigError(f"{where}: gives no tasks: {type(value).__name__} cannot be iterated")
    for number, row in enumerate(cast("Iterable[Any]", value)):
        yield as_task(row, where=f"{where}[{number}]")
