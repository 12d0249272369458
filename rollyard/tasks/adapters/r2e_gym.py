"""R2E-Gym: rows of a commit each, with the image of the commit before it and what its tests print after it.

The image's own copy of the tests is removed before the agent starts, and its repository, which has the commit itself, is sealed.
The judge gets the tests out of the row. The verdict is the set's own: every test ends as it did after the commit, and no other
test is there.
"""

from __future__ import annotations

import importlib.resources
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollyard.core.bad_json import BAD_JSON
from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import (
    SEAL,
    SEALING,
    Row,
    field,
    first_row,
    is_wanted,
    reward_script,
    row_drafts,
    write_task,
)

_WORKDIR = "/testbed"
_HIDDEN = ("/r2e_tests", "/root/r2e_tests", "r2e_tests", "run_tests.sh", "install.sh", "expected_test_output.json",
           "execution_result.json", "parsed_commit.json", "syn_issue.json", "modified_files.json",
           "modified_entities.json")  # fmt: skip
_RUNNERS = ("tornado_unittest_runner.py", "unittest_custom_runner.py")  # a file among the tests that runs the others
_PYTEST = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests"
)
_COMMANDS = {"orange3": f"QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum env {_PYTEST}"}
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.S)
_LOG = "/logs/verifier/tests.log"
_TIMEOUT_S = 1800.0
_Kind = TypeVar("_Kind")


class _File(msgspec.Struct, frozen=True):
    path: str


class _Header(msgspec.Struct, frozen=True):
    file: _File


class _FileDiff(msgspec.Struct, frozen=True, kw_only=True):
    header: _Header
    new_file_content: str
    plus_file: _File | None = None


class _Commit(msgspec.Struct, frozen=True):
    file_diffs: list[_FileDiff]


class _Execution(msgspec.Struct, frozen=True):
    test_file_names: list[str]
    test_file_codes: list[str]


def recognise(source: Path) -> bool:
    return {"docker_image", "expected_output_json", "parsed_commit_content"} <= first_row(source).keys()


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`instances` are globs over `REPOSITORY-COMMIT`."""

    def name(_number: int, row: Row) -> str | None:
        found = _name(row)
        return found if is_wanted(found, options) else None

    yield from row_drafts(source, name, _write)


def _name(row: Row) -> str:
    return f"{row.get('repo_name', '')}-{row.get('commit_hash', '')}"


def _write(row: Row, folder: Path) -> None:
    name = _name(row)
    commit = _decode(row, "parsed_commit_content", _Commit)
    execution = _decode(row, "execution_result_content", _Execution)
    expected = _decode(row, "expected_output_json", dict[str, str])
    repo = str(field(row, "repo_name"))
    if "PASSED" not in expected.values():
        raise ConfigError(f"{name}: no test passes after its commit")
    tests = dict(zip(execution.test_file_names, execution.test_file_codes, strict=False))
    if not tests:
        raise ConfigError(f"{name}: the row has no tests")
    runner = next((file for file in _RUNNERS if file in tests), None)
    run = f".venv/bin/python -W ignore r2e_tests/{runner}" if runner else _COMMANDS.get(repo, _PYTEST)
    changed = [one for one in commit.file_diffs if one.header.file.path.endswith(".py")]
    removed = [one.header.file.path for one in changed if one.plus_file and one.plus_file.path == "/dev/null"]
    issue = str(field(row, "problem_statement"))
    described = _ISSUE.search(issue)
    inside = importlib.resources.files("rollyard.inside")
    script = [
        f"cd {_WORKDIR} || exit 1",
        "rm -rf r2e_tests && cp -r /tests/r2e_tests r2e_tests || exit 1",
        f"{{ {run}; }} > {_LOG} 2>&1",
        f"tail -c 20000 {_LOG}",
        f"python3 /tests/log_check.py {_LOG} /tests/tests.json",
        "",
    ]
    solve = ["#!/bin/bash", f"cd {_WORKDIR} && cp -r /solution/files/. ."]
    solve += [f"rm -f {shlex.quote(path)}" for path in removed]
    write_task(
        folder,
        instruction=f"{(described[1] if described else issue).strip()}\n\n"
        f"The repository is in {_WORKDIR}. Change its source, not its tests.",
        table={
            "metadata": {
                "repo": repo,
                "rollyard": {
                    "verifier": "commands",
                    "options": {"commands": ["bash /tests/run.sh"], "score": "all", "timeout_s": _TIMEOUT_S},
                    "grade": "sealed",
                    "setup": [SEALING, f"rm -rf {' '.join(_HIDDEN)}"],
                },
            },
            "environment": {"workdir": _WORKDIR, "docker_image": str(field(row, "docker_image"))},
            "agent": {"timeout_sec": 3000.0},
            "verifier": {"timeout_sec": _TIMEOUT_S + 30.0},
        },
        tests={
            "run.sh": "\n".join(script),
            "test.sh": reward_script("bash /tests/run.sh"),
            "tests.json": msgspec.json.encode({"EXPECTED": expected, "format": "r2e"}),
            "log_check.py": inside.joinpath("log_check.py").read_bytes(),
            **{f"r2e_tests/{file}": code for file, code in tests.items()},
        },
        solution={
            "solve.sh": "\n".join([*solve, ""]),
            **{
                f"files/{one.header.file.path}": one.new_file_content
                for one in changed
                if one.header.file.path not in removed
            },
        },
        files={SEAL: inside.joinpath(SEAL).read_bytes()},
    )


def _decode(row: Row, name: str, kind: type[_Kind]) -> _Kind:
    """A field that is JSON in a string."""
    try:
        return msgspec.json.decode(str(field(row, name)), type=kind)
    except BAD_JSON as error:
        raise ConfigError(f"{name}: {error}") from error


adapter = Adapter(
    about="R2E-Gym rows: a commit each, with its image and what its tests print",
    get="the set's rows as JSON Lines or Parquet",
    recognise=recognise,
    read=read,
    needs=("the instances' images",),
    options=("instances",),
    carries=("log_check.py", SEAL),
)
