"""First files of something new: a task folder, a Python taskset, an agent, a script, an evaluation, a verifier. Each works as it
is, so that the first change is a change to something that ran."""

from __future__ import annotations

import re
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from rollyard.core.errors import ConfigError
from rollyard.tasks.harbor.files import copy_template

TaskKind = Literal["tests", "pytest", "steps"]
_TEMPLATES = {"tests": "task", "pytest": "task-pytest", "steps": "task-steps"}
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def _find_free_path(path: Path) -> Path:
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise ConfigError(f"{path} exists already", hint="choose another name")
    return path


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name: lower-case letters, digits, '-', '_' and '.'")
    return name


def new_task(path: Path, kind: TaskKind = "tests") -> Path:
    """A task folder that `rollyard check tasks` accepts."""
    _check_name(path.name)
    with as_file(files("rollyard.tasks").joinpath("templates", _TEMPLATES[kind])) as template:
        copy_template(template, _find_free_path(path))
    return path


def _write(path: Path, suffix: str, template: str, **words: str) -> Path:
    """One file from a template, with `{word}` replaced; the suffix is added where it is missing."""
    target = _find_free_path(path if path.suffix == suffix else path.with_name(path.name + suffix))
    text = files("rollyard.tasks").joinpath("templates", *template.split("/")).read_text("utf-8")
    for word, value in {"name": target.name, **words}.items():
        text = text.replace(f"{{{word}}}", value)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def new_taskset(path: Path) -> Path:
    """A Python file with three tasks and a verifier."""
    return _write(path, ".py", "taskset/taskset.py.txt")


def new_agent(path: Path) -> Path:
    """An agent described in TOML: a small program that asks the model once."""
    name = _check_name(path.name.removesuffix(".toml"))
    return _write(path, ".toml", "agent/agent.toml", agent=name, name=name)


def new_script(path: Path) -> Path:
    """Answers of a scripted policy, which solve what `new_task` makes."""
    return _write(path, ".yaml", "script/script.yaml")


def new_verifier(path: Path) -> Path:
    """A Python file with a verifier for what `new_task` makes."""
    return _write(path, ".py", "verifier/verifier.py.txt")


def new_eval(path: Path) -> Path:
    """A folder with an evaluation that runs as it is: `eval.toml`, a task and a script."""
    _find_free_path(path)
    new_task(path / "hello")
    new_script(path / "script.yaml")
    return _write(path / "eval.toml", ".toml", "eval/eval.toml")
