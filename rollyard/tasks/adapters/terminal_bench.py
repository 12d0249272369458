"""Terminal-Bench 1: folders with `task.yaml`, `Dockerfile`, `run-tests.sh`, `tests/` and `solution.sh`.

Its base images have /app as their working directory, and the Dockerfile is told so. `run-tests.sh` fetches its tools from the
web; where it only runs pytest on the tests, they are run by pytest from a layer, with the pinned packages that the script
installs. Where it does more, its other lines are run too. A script that runs no pytest is run as it is. Tests look at the whole
file system, so the grade is `shared`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import Adapter, TaskDraft, terminal_bench_services
from rollyard.tasks.adapters.drafts import WORKDIR, SourceFile, read_text_inside, reward_script, write_task

_NOT_ENVIRONMENT = ("task.yaml", "run-tests.sh", "solution.sh", "solution.yaml", "docker-compose.yaml", "tests")
_PYTEST = "pytest==8.4.1"
_RUN_TESTS = reward_script("TEST_DIR=/tests bash /tests/run-tests.sh")
_PINNED = re.compile(r"\b([A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+)")
_INSTALL = re.compile(r"^\s*(?:uv (?:pip install|add)|pip3? install|python3? -m pip install|uvx)\b(.*)$", re.M)
_RUNS_PYTEST = re.compile(r"^\s*(?:uv run |uvx .*)?pytest (?:-\S+ )*\"?\$\{?TEST_DIR\}?/", re.M)
_UV = re.compile(r"\buv run |\buvx .*?(?=pytest )")
_TOOLS = re.compile(  # lines that only fetch pytest and what tests import
    r"\s*(?:#.*|set -\S+|source \S*(?:local/bin/env|/activate)|\. \S*/activate|curl \S+ https://astral\.sh/\S+ \| sh"
    r"|export PATH=\S+|apt(?:-get)? update(?: -\S+)*|apt(?:-get)? install (?:-\S+ )*curl(?:=\S+)?"
    r"|uv (?:venv|init|pip install|add|python pin)\b.*|(?:python3? -m )?pip3? install\b.*|python3? -m venv \S+)\s*"
    r"(?:(?:&&|;) apt-get install -y curl)?\s*$"
)
_NO_WORKDIR = re.compile(r"^if \[ \"\$PWD\" = \"/\" \]; then\n.*?^fi$", re.M | re.S)
_COPY = re.compile(r"^(?:COPY|ADD)\s+(.*)$", re.M | re.I)
_FROM = re.compile(r"^(FROM\s+(?:--platform=\S+\s+)?(\S*t-bench/\S+).*)$", re.M | re.I)

_ANY_FROM = re.compile(r"^FROM\s+(?:--platform=\S+\s+)?(?P<base>\S+)(?:\s+AS\s+(?P<stage>\S+))?[^\S\n]*$", re.M | re.I)


def recognise(source: Path) -> bool:
    return source.is_dir() and any(_is_task(file.parent) for file in source.glob("*/task.yaml"))


def _is_task(folder: Path) -> bool:
    return (folder / "run-tests.sh").is_file()


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    for file in sorted(source.glob("*/task.yaml")):
        yield TaskDraft(file.parent.name, partial(_write, file.parent, options))


def _write(source: Path, options: Mapping[str, Any], folder: Path) -> None:
    try:
        task: Any = yaml.safe_load(_text(source, "task.yaml"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source / 'task.yaml'}: {error}") from error
    if not _is_task(source) or not isinstance(task, dict) or not cast("dict[str, Any]", task).get("instruction"):
        raise ConfigError(f"{source}: no run-tests.sh or no instruction in it")
    environment = _tree(source, leave_out=_NOT_ENVIRONMENT) | _tests_in_image(source)
    compose = _compose(source)
    image = str(options.get("image", ""))
    for name in [name for name in environment if name.rpartition("/")[2].startswith("Dockerfile")]:
        environment[name] = _place(_text(source, name), image)
    if compose:
        environment |= terminal_bench_services.translate(compose, environment)
    extra, tests = _judge(_text(source, "run-tests.sh"), str(options.get("packages", "")))
    extra["grade"] = str(options.get("grade", "shared"))
    table = {
        "metadata": {
            **{name: task[name] for name in ("difficulty", "category", "tags") if task.get(name)},
            "rollyard": extra,
        },
        "environment": {} if {"Dockerfile", "docker-compose.yaml"} & set(environment) else {"workdir": WORKDIR},
        "agent": {"timeout_sec": float(task.get("max_agent_timeout_sec") or 900.0)},
        "verifier": {"timeout_sec": float(task.get("max_test_timeout_sec") or 180.0)},
    }
    write_task(
        folder,
        instruction=str(task["instruction"]),
        table=table,
        tests={**_tree(source / "tests"), **tests},
        solution=_solution(source),
        environment=environment,
    )


def _place(dockerfile: str, image: str) -> str:
    """The working directory that a base image of the benchmark brings, said; and `image` in place of what FROM lines name."""
    said = _FROM.sub(rf"\1\nWORKDIR {WORKDIR}", dockerfile)
    stages = {match["stage"].lower() for match in _ANY_FROM.finditer(said) if match["stage"]}

    def replace(match: re.Match[str]) -> str:
        base, stage = match["base"], match["stage"]
        if not image or base.lower() in stages:
            return match[0]
        return f"FROM {image}" + (f" AS {stage}" if stage else "")

    return _ANY_FROM.sub(replace, said)


def _tree(root: Path, leave_out: tuple[str, ...] = ()) -> dict[str, str | bytes]:
    found = {
        path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()
    }
    return {
        name.as_posix(): SourceFile.read(path, root) for name, path in found.items() if name.parts[0] not in leave_out
    }


def _tests_in_image(source: Path) -> dict[str, str | bytes]:
    """Files of the tests that the Dockerfile itself gives to the agent."""
    text = _text(source, "Dockerfile") if (source / "Dockerfile").is_file() else ""
    words = [word.removeprefix("./") for line in _COPY.findall(text) for word in line.split()[:-1]]
    named = [source / word for word in words if word.startswith("tests/") and "*" not in word]
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return {file.relative_to(source).as_posix(): SourceFile.read(file, source) for file in files}


def _text(source: Path, name: str) -> str:
    """Of the task, or of what the tasks of one set share."""
    return read_text_inside(source / name, source.parent)


def _compose(source: Path) -> dict[str, Any]:
    compose = source / "docker-compose.yaml"
    if not compose.is_file():
        return {}
    try:
        found: Any = yaml.safe_load(_text(source, compose.name)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{compose}: {error}") from error
    return found if isinstance(found, dict) and isinstance(found.get("services"), dict) else {}


def _judge(script: str, versions: str) -> tuple[dict[str, Any], dict[str, str | bytes]]:
    """How the tests are run: by pytest from a layer, by the script's other lines and that pytest, or by the script itself.
    `versions` are of packages that it installs without one."""
    whole = _NO_WORKDIR.sub("", script.replace("\\\n", " "))
    if not _RUNS_PYTEST.search(whole):
        return {}, {"run-tests.sh": script, "test.sh": _RUN_TESTS}
    installed = " ".join(_INSTALL.findall(whole))
    named = {word.lower() for word in installed.split()}
    more = [package for package in versions.split(",") if package.partition("==")[0].lower() in named]
    packages = list(dict.fromkeys([*_PINNED.findall(installed), *more]))
    if not any(name.startswith("pytest==") for name in packages):
        packages.insert(0, _PYTEST)
    found = {"verifier_layers": [f"pip:{','.join(packages)}"]}
    left = [line for line in whole.splitlines() if line.strip() and not _TOOLS.match(line)]
    if all(_RUNS_PYTEST.match(line) for line in left):
        options = {"paths": ["test_outputs.py"], "timeout_s": 1800.0}
        return {"verifier": "pytest", "options": options, **found}, {}
    lines = [_UV.sub("", line) for line in left]
    return found, {"run-tests.sh": "\n".join([*lines, ""]), "test.sh": _RUN_TESTS}


def _solution(source: Path) -> dict[str, str | bytes]:
    if (source / "solution.sh").is_file():
        return {"solve.sh": _text(source, "solution.sh")}
    steps = source / "solution.yaml"
    if not steps.is_file():
        return {}
    typed = cast("list[dict[str, Any]]", yaml.safe_load(_text(source, steps.name)) or [])
    if not all(step.get("append_enter", True) for step in typed):
        return {}  # keys for a program on a terminal, not lines for a shell
    return {"solve.sh": "\n".join(["#!/bin/bash", *(str(step["command"]) for step in typed), ""])}


adapter = Adapter(
    about="Terminal-Bench 1 task folders",
    get="tasks/ of a checkout of the terminal-bench repository; its base images by `rollyard image add`",
    recognise=recognise,
    read=read,
    needs=("images of the tasks' FROM lines", "a network for most builds"),
    options=("grade", "image", "packages"),
)
