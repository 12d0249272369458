"""First files of something new: a task folder, a Python taskset, an agent. Each works as it is, so that the first change is a
change to something that ran."""

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


def _free(path: Path) -> Path:
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
        copy_template(template, _free(path))
    return path


def new_taskset(path: Path) -> Path:
    """A Python file with three tasks and a verifier."""
    target = _free(path if path.suffix == ".py" else path.with_suffix(".py"))
    template = files("rollyard.tasks").joinpath("templates", "taskset", "taskset.py.txt").read_text("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(template.replace("{name}", target.name))
    return target


def new_agent(path: Path) -> Path:
    """An agent described in TOML: a small program that asks the model once."""
    target = _free(path if path.suffix == ".toml" else path.with_suffix(".toml"))
    name = _check_name(target.stem)
    template = files("rollyard.tasks").joinpath("templates", "agent", "agent.toml").read_text("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(template.replace("{agent}", name).replace("{name}", name))
    return target
