"""SWE-bench Pro: rows of the set, and the folder `run_scripts` of its repository, with a script and a parser for each instance.

An instance runs in the image that its row names, with the repository sealed before the agent starts. The set's own harness takes
the new tests from a later commit of that repository, which is not there any more: here they come out of the row's test patch. The
instance's own script runs them, its own parser reads what was printed, and all that had to pass must be PASSED.
"""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.core.errors import ConfigError
from rollyard.tasks.adapters import Adapter, TaskDraft
from rollyard.tasks.adapters.drafts import (
    SEAL,
    SEALING,
    WORKDIR,
    Row,
    field,
    first_row,
    is_wanted,
    put_tests_back,
    read_text_inside,
    reward_script,
    row_drafts,
    string_list,
    write_task,
)

_IMAGE = "jefzda/sweap-images:{tag}"
_SCRIPTS = ("run_script.sh", "parser.py")
_TIMEOUT_S = 3600.0


def recognise(source: Path) -> bool:
    return {"instance_id", "selected_test_files_to_run"} <= first_row(source).keys()


def read(source: Path, options: Mapping[str, Any]) -> Iterator[TaskDraft]:
    """`run_scripts` is that folder of the set's repository; `image` is an image's name with `{tag}` in it."""
    if not options.get("run_scripts"):
        raise ConfigError(
            "the rows of SWE-bench Pro do not say how tests are run",
            hint="--option run_scripts=FOLDER, of a checkout of github.com/scaleapi/SWE-bench_Pro-os",
        )

    def name(_number: int, row: Row) -> str | None:
        found = str(row.get("instance_id", ""))
        return found if is_wanted(found, options) else None

    yield from row_drafts(source, name, lambda row, folder: _write(row, options, folder))


def _write(row: Row, options: Mapping[str, Any], folder: Path) -> None:
    name, test_patch = str(field(row, "instance_id")), str(field(row, "test_patch"))
    expected = {
        "FAIL_TO_PASS": string_list(field(row, "fail_to_pass", "FAIL_TO_PASS")),
        "PASS_TO_PASS": string_list(row.get("pass_to_pass") or row.get("PASS_TO_PASS")),
        "format": "results",
    }
    if not expected["FAIL_TO_PASS"]:
        raise ConfigError(f"{name}: no test fails before its patch")
    home = Path(str(options["run_scripts"])).expanduser()
    scripts = {script: read_text_inside(home / name / script, home) for script in _SCRIPTS}
    inside = importlib.resources.files("rollyard.inside")
    table = {
        "metadata": {
            "repo": str(field(row, "repo")),
            "rollyard": {
                "verifier": "commands",
                "options": {"commands": ["bash /tests/run.sh"], "score": "all", "timeout_s": _TIMEOUT_S},
                "grade": "sealed",
                "setup": [SEALING],
            },
        },
        "environment": {
            "workdir": WORKDIR,
            "docker_image": str(options.get("image", _IMAGE)).replace("{tag}", str(field(row, "dockerhub_tag"))),
        },
        "agent": {"timeout_sec": 3000.0},
        "verifier": {"timeout_sec": _TIMEOUT_S + 30.0},
    }
    write_task(
        folder,
        instruction=_describe(row),
        table=table,
        tests={
            **scripts,
            "run.sh": _run_script(row, test_patch),
            "test.sh": reward_script("bash /tests/run.sh"),
            "test.patch": test_patch,
            "tests.json": msgspec.json.encode(expected),
            "log_check.py": inside.joinpath("log_check.py").read_bytes(),
        },
        solution={
            "solve.sh": f"#!/bin/bash\ncd {WORKDIR} && git apply /solution/gold.patch\n",
            "gold.patch": str(field(row, "patch")),
        },
        files={SEAL: inside.joinpath(SEAL).read_bytes()},
    )


def _describe(row: Mapping[str, Any]) -> str:
    parts = [str(field(row, "problem_statement")).strip()]
    for title, name in (("Requirements", "requirements"), ("New interfaces", "interface")):
        if row.get(name):
            parts.append(f"{title}:\n{str(row[name]).strip()}")
    return "\n\n".join([*parts, f"The repository is in {WORKDIR}. Change its source, not its tests."])


def _run_script(row: Mapping[str, Any], test_patch: str) -> str:
    wanted = shlex.quote(",".join(string_list(field(row, "selected_test_files_to_run"))))
    logs, base = "/logs/verifier", str(field(row, "base_commit"))
    lines = [
        *put_tests_back(WORKDIR, base, test_patch, str(field(row, "patch"))),
        f"bash /tests/run_script.sh {wanted} > {logs}/stdout.log 2> {logs}/stderr.log",
        f"rm -rf {logs}/results.json",  # whatever the code under test has put there
        f"python3 /tests/parser.py {logs}/stdout.log {logs}/stderr.log {logs}/results.json",
        f"tail -c 20000 {logs}/stdout.log",
        f"python3 /tests/log_check.py {logs}/results.json /tests/tests.json",
    ]
    return "\n".join([*lines, ""])


adapter = Adapter(
    about="SWE-bench Pro instances: rows, with the scripts of its repository",
    get="the set's rows as JSON Lines, CSV or Parquet; run_scripts/ of a checkout of github.com/scaleapi/SWE-bench_Pro-os",
    recognise=recognise,
    read=read,
    needs=("the instances' images, which have git and python3",),
    options=("image", "instances", "run_scripts"),
    carries=("log_check.py", SEAL),
)
